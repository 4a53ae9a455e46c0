"""The files of a model's folder that hold its chat templates.

A model has one template, or several by name: "default", "tool_use" for requests with tools, and
others that are not used. Newer models have chat_template.jinja and additional_chat_templates/.
Older ones state them in tokenizer_config.json, and multimodal ones in chat_template.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import read_json
from kvkeep.storage.files.text import ENCODING

TEMPLATE_FILE, ADDITIONAL_FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
_CONFIG_FILE, _PROCESSOR_FILE = "tokenizer_config.json", "chat_template.json"


def template_source(folder: Path, with_tools: bool = False) -> str:
    """Return the chat template of the model in `folder`; with tools, the one for tools if it has.

    Raises UnsupportedModel without one, BadModelFile if it cannot be read.
    """
    templates = _templates_by_name(folder)
    source = templates.get(TOOL_USE) if with_tools else None
    source = templates.get(DEFAULT) if source is None else source
    if source is None:
        raise UnsupportedModel(
            f"the model has no chat template ({TEMPLATE_FILE}, or chat_template in "
            f"{_CONFIG_FILE}); use it without a chat template, use its instruct version, or put "
            f"{TEMPLATE_FILE} into its folder"
        )
    return source


def tokenizer_config(folder: Path) -> Mapping[str, Any]:
    """Return the contents of tokenizer_config.json, empty without the file."""
    return _read_json_or_empty(folder / _CONFIG_FILE)


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
