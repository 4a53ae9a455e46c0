"""Calls of custom tools, whose arguments are a JSON object with one text."""

import re
from collections.abc import Mapping

from pydantic_core import from_json

from kvkeep.chat.openai_tools import custom_input

_OPENING = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"input"[ \t\r\n]*:[ \t\r\n]*"')
_HIGH_SURROGATE = r"\\u[dD][89abAB]"
# Of the inside of a JSON string, up to its end or to an escape that is not whole.
_WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]+'
    r"|\\[^u]"
    rf"|(?!{_HIGH_SURROGATE})\\u[0-9a-fA-F]{{4}}"
    rf"|{_HIGH_SURROGATE}[0-9a-fA-F]{{2}}\\u[0-9a-fA-F]{{4}})*"
)


class CustomInput:
    """The input of a custom tool's call, read as the JSON of its arguments comes.

    The arguments are the object that the tool's schema describes, `{"input": "..."}`. Inside its
    text only what is new is decoded; elsewhere, and in other JSON, all of the arguments.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._texts: list[str] = []  # that were returned
        self._may_open = True  # the text of `input` may begin
        self._undecoded: str | None = None  # the end of its JSON so far; None outside of it

    @property
    def text(self) -> str:
        """The texts that were returned, joined."""
        return "".join(self._texts)

    def push(self, delta: str) -> str:
        """Append to the arguments. Returns what the input has in addition."""
        self._arguments.append(delta)
        string: str | None = None  # what was not decoded, if all of it is in the string
        if self._undecoded is not None:
            string = self._undecoded + delta
        elif self._may_open and (match := _OPENING.match("".join(self._arguments))):
            self._may_open, string = False, match.string[match.end() :]
        text = None if string is None else self._decode(string)
        if text is None:
            self._undecoded = None
            return self.extend(generated_input("".join(self._arguments), complete=False))
        self._texts.append(text)
        return text

    def extend(self, text: str) -> str:
        """Return what a text has in addition to the texts that were returned; "" if it differs."""
        sent = self.text
        if not text.startswith(sent):
            return ""
        self._texts.append(text[len(sent) :])
        return self._texts[-1]

    def _decode(self, string: str) -> str | None:
        """Return the text of a part of a JSON string; None if it ends there, or is invalid."""
        match = _WHOLE_CHARACTERS.match(string)
        assert match is not None
        undecoded = string[match.end() :]
        if undecoded.startswith('"'):
            return None
        try:
            text = from_json(f'"{string}', allow_partial="trailing-strings")
        except ValueError:
            return None
        self._undecoded = undecoded
        return str(text)


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
