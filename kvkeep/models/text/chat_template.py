"""Rendering of messages with a model's own chat template, in a sandbox."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep import validation
from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel
from kvkeep.models.text.template_files import TEMPLATE_FILE
from kvkeep.models.text.template_texts import TemplateTexts

if TYPE_CHECKING:
    from jinja2 import Template

# Fields of a message that clients write its reasoning in, the usual one first.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Variables and functions of every template, which `template_kwargs` cannot replace.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", *_SPECIAL_TOKENS),
        *("raise_exception", "strftime_now", "range", "dict", "namespace", "cycler", "joiner"),
    )
)
_EXAMPLE = 'a message is {"role": "user", "content": "..."}'


def render_chat(
    tokenizer_config: Mapping[str, Any],
    texts: TemplateTexts,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render messages and tools, checked before, with a model's chat template.

    texts: the template; it converts the texts that it and the tokenizer's config state.
    template_kwargs: more variables for the template, not those above.

    Raises UnsupportedModel without a valid template, BadModelFile for an invalid special token, and
    InvalidArgument if it refuses the messages or fails on them, or for a reserved name.
    """
    from jinja2 import TemplateError

    if reserved := sorted(_RESERVED.intersection(template_kwargs or ())):
        raise InvalidArgument(
            f"a variable for the chat template cannot be named {', '.join(reserved)}: kvkeep sets "
            "it; use another field of the request, or leave it out"
        )
    template = _compile(texts, len(messages))
    special_tokens = _special_tokens(tokenizer_config)
    try:
        variables = {
            "documents": None,
            **(template_kwargs or {}),
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **{name: texts.convert(text) for name, text in special_tokens.items()},
        }
        return template.render(variables)
    except TemplateError as error:
        raise InvalidArgument(
            f"the model's chat template rejects these messages: {error.message}"
        ) from error
    except Exception as error:  # a template is an untrusted program
        raise InvalidArgument(
            f"the model's chat template fails on these messages ({_error_text(error)}); leave out "
            f"what it does not support, or put another template ({TEMPLATE_FILE}) into the "
            "model's folder"
        ) from error


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as dicts.

    Raises InvalidArgument if a message lacks "role" or, without tool calls, "content" as text.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise InvalidArgument(f"messages must be a list, {_EXAMPLE}; found {messages!r}")
    message_list = list(messages)
    for index, message in enumerate(message_list):
        fields = message if isinstance(message, Mapping) else {}
        for field in ("role", "content"):
            value = fields.get(field)
            if field == "content" and value is None and fields.get("tool_calls"):
                continue
            if field == "content" and _is_part_list(value):
                continue
            if not isinstance(value, str):
                raise InvalidArgument(
                    f"message {index} must have {field!r} as text, found {message!r}; {_EXAMPLE}"
                )
            validation.text(f"{field!r} of message {index}", value)
    return [dict(message) for message in message_list]


def _is_part_list(content: Any) -> bool:
    """Whether a content is a list of parts, which templates of multimodal models take.

    They are texts and, as templates of Mistral's models take it, reasoning.
    """
    return isinstance(content, list) and all(
        isinstance(part, Mapping)
        and isinstance(part.get("thinking" if part.get("type") == "thinking" else "text"), str)
        for part in content
    )


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools. Raises InvalidArgument if one is not a JSON schema as a dict."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise InvalidArgument(f"tools must be a list of JSON schemas, found {tools!r}")
    tool_list: list[Any] = list(tools)
    for index, tool in enumerate(tool_list):
        if not isinstance(tool, dict):
            raise InvalidArgument(f"tool {index} must be a JSON schema as a dict, found {tool!r}")
        try:
            json.dumps(tool)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"tool {index} is not a JSON schema: {error}") from error
    return tool_list


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning under both names that templates read."""
    values = (message.get(name) for name in REASONING_FIELDS)
    reasoning = next((value for value in values if value is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _compile(texts: TemplateTexts, message_count: int) -> "Template":
    from jinja2 import TemplateSyntaxError

    from kvkeep.models.text.sandbox import compile_template

    try:
        return compile_template(texts, message_count)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except Exception as error:  # Python rejects the code that jinja generated
        reason = _error_text(error)
    raise UnsupportedModel(
        f"the model's chat template cannot be rendered ({reason}); put another {TEMPLATE_FILE} "
        "into its folder"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token and so on; some configs state an object with "content"."""
    texts = {}
    for name in _SPECIAL_TOKENS:
        text = config.get(name)
        if isinstance(text, dict):
            text = text.get("content")
        if text is not None and not isinstance(text, str):
            raise BadModelFile(f"tokenizer_config.json: {name} must be text, found {text!r}")
        # Templates write them unconditionally; an absent one must not render as "None".
        texts[name] = text or ""
    return texts


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
