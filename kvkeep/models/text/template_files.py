"""The files of a model's folder that hold its chat templates.

A model has one template, or several by name: "default", "tool_use" for requests with tools, and
others that are not used. Newer models have chat_template.jinja and additional_chat_templates/.
Older ones state them in tokenizer_config.json, and multimodal ones in chat_template.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import read_json
from kvkeep.storage.files.text import ENCODING

TEMPLATE_FILE, ADDITIONAL_FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
_CONFIG_FILE, _PROCESSOR_FILE = "tokenizer_config.json", "chat_template.json"


@dataclass(frozen=True)
class TemplateFiles:
    """A model's chat templates by name, and the contents of tokenizer_config.json, if any."""

    templates: Mapping[str, str]
    tokenizer_config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the files of a model's folder. Raises BadModelFile if one cannot be read."""
        return cls(_templates_by_name(folder), _read_json_or_empty(folder / _CONFIG_FILE))

    def source(self, with_tools: bool = False) -> str:
        """Return the chat template; with tools, the one for tools if there is one.

        Raises UnsupportedModel without a template.
        """
        source = self.templates.get(TOOL_USE) if with_tools else None
        source = self.templates.get(DEFAULT) if source is None else source
        if source is None:
            raise UnsupportedModel(
                f"the model has no chat template ({TEMPLATE_FILE}, or chat_template in "
                f"{_CONFIG_FILE}); use it without a chat template, use its instruct version, or "
                f"put {TEMPLATE_FILE} into its folder"
            )
        return source


def _templates_by_name(folder: Path) -> dict[str, str]:
    """Return the model's templates. Those in files of their own replace those in JSON files."""
    paths = {path.stem: path for path in sorted((folder / ADDITIONAL_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        paths[DEFAULT] = folder / TEMPLATE_FILE
    files = {name: _read_template(path) for name, path in paths.items()}
    if DEFAULT in files:
        return files
    stated = _stated_templates(folder / _CONFIG_FILE) or _stated_templates(folder / _PROCESSOR_FILE)
    return {**stated, **files}


def _stated_templates(path: Path) -> dict[str, str]:
    """Return the templates in a JSON file: one, a list of names and templates, or a dict."""
    value = _read_json_or_empty(path).get("chat_template")
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    items = value.items() if isinstance(value, dict) else ()
    return {
        name: source for name, source in items if isinstance(name, str) and isinstance(source, str)
    }


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding=ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadModelFile(
            f"the chat template {path.name} cannot be read ({reason}); fetch the model again"
        ) from error


def _read_json_or_empty(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}
