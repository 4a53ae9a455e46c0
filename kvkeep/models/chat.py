"""A model's own chat template, rendered in a sandbox."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kvkeep import arguments
from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel
from kvkeep.models.config import read_json

_EXAMPLE = 'a message is {"role": "user", "content": "..."}'
_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


def render_chat(
    folder: Path, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
) -> str:
    """The text that the model in `folder` was trained to see for these messages.

    messages: as `checked_messages` gives them.

    Raises UnsupportedModel if it has no template or one that is not valid jinja, InvalidArgument
    for messages that the template refuses.
    """
    config = read_json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
    template = _compile(_find_template(folder, config), folder)
    from jinja2 import TemplateError

    try:
        return str(
            template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **_special_tokens(config),
            )
        )
    except TemplateError as error:
        raise InvalidArgument(
            f"the model's chat template refuses these messages: {error.message}"
        ) from error


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages; raises InvalidArgument where one lacks a role or a content, both text."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise InvalidArgument(f"messages must be a list of them, {_EXAMPLE}; found {messages!r}")
    checked = list(messages)
    for index, message in enumerate(checked):
        for key in ("role", "content"):
            found = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(found, str):
                raise InvalidArgument(
                    f"message {index} must have {key!r} as text, found {message!r}; {_EXAMPLE}"
                )
            arguments.text(f"{key!r} of message {index}", found)
    return [dict(message) for message in checked]


def _find_template(folder: Path, config: Mapping[str, Any]) -> str:
    if (folder / _TEMPLATE).exists():
        return (folder / _TEMPLATE).read_text(encoding="utf-8")
    inline = config.get("chat_template")
    if isinstance(inline, list):
        named = {entry.get("name"): entry.get("template") for entry in inline}
        inline = named.get("default")
    if not isinstance(inline, str):
        raise UnsupportedModel(
            f"the model in {folder} has no chat template ({_TEMPLATE}, or chat_template in "
            f"{_CONFIG}); continue plain text with it, take its instruct version, or put a "
            "template there"
        )
    return inline


def _compile(source: str, folder: Path) -> Any:
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks what to train on; to render it is just what is in it."""

        tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # Block trimming is what templates for transformers are written for.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UnsupportedModel(
            f"the chat template in {folder} is not one that kvkeep can render (line "
            f"{error.lineno}: {error.message}); put another in {folder / _TEMPLATE}"
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on, which configs give as text or as an object with its content."""
    tokens = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise BadModelFile(f"{_CONFIG}: {key} must be text, found {value!r}")
        # Templates write them unconditionally; an absent one is nothing, not the word "None".
        tokens[key] = value or ""
    return tokens


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: jinja's own filter escapes it for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
