"""Calls of custom tools, whose arguments are a JSON object with one text."""

from collections.abc import Mapping

from pydantic_core import from_json

from kvkeep.chat.openai_tools import custom_input


def generated_input(arguments: str, complete: bool) -> str:
    """Return the text that a custom tool is called with, or its beginning.

    complete: whether the arguments are whole, and not the beginning of their JSON.
    """
    if complete:
        return custom_input(arguments)
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = value.get("input") if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else ""
