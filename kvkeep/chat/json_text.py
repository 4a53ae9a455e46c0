"""Incremental reading of one JSON value in generated text."""

import json
import math
import re

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[^\s,:\[\]{}\"\ud800-\udfff]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_UNICODE_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,4}")
_LOW_SURROGATE_ESCAPE = re.compile(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]{0,2})?)?)?)?")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 200  # of nested objects and arrays; parsers of clients recurse
_MAX_SCALAR = 400  # characters of a number; a longer one would be read again with each token


class JsonText:
    """One JSON value, read as its text comes.

    `push` returns valid JSON text; joined, it is the whole value once `done`. Small faults of
    models are mended: line breaks and wrong escapes in strings, Python's `True`, `False` and
    `None`, and a comma before a closing bracket. At any other fault it has `failed`.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._in_string = False
        self._open: list[str] = []  # brackets
        # "value", "item" (or "]"), "key" (or "}"), "colon", or "next" (a comma or closing bracket)
        self._expected = "value"
        self._comma = ""  # a comma and white space, until something follows it

    def push(self, text: str) -> tuple[int, str]:
        """Read from the start of a text. Returns the number of characters read, and their JSON.

        Characters that need the following ones to be understood are not read: pass them again.
        """
        place, output = 0, []
        while place < len(text) and not (self.done or self.failed):
            length, json_text = (
                self._read_string(text, place) if self._in_string else self._read(text, place)
            )
            output.append(json_text)
            if not length:
                break
            place += length
        return place, "".join(output)

    def _read_string(self, text: str, place: int) -> tuple[int, str]:
        """Read a part of a string. Returns (0, "") if more text is needed."""
        match = _STRING_RUN.match(text, place)
        assert match is not None
        if match[0]:
            return len(match[0]), match[0]
        char = text[place]
        if char == '"':
            self._in_string = False
            if self._expected == "key":
                self._expected = "colon"
            else:
                self._end_value()
            return 1, char
        if char != "\\":
            return 1, json.dumps(char)[1:-1]
        return _read_escape(text, place)

    def _read(self, text: str, place: int) -> tuple[int, str]:
        """Read a part outside of strings."""
        char = text[place]
        if char in " \t\r\n":
            if self._comma:
                self._comma += char
                return 1, ""
            return 1, char
        if char in "]}":
            return self._close(char)
        if self._expected == "next":
            return self._fail() if char != "," else self._take_comma()
        if self._expected == "colon":
            if char != ":":
                return self._fail()
            self._expected = "value"
            return 1, char
        comma, self._comma = self._comma, ""
        if char == '"':
            self._in_string = True
            return 1, comma + char
        if self._expected == "key":
            return self._fail()
        if char in "[{":
            if len(self._open) == _MAX_DEPTH:
                return self._fail()
            self._open.append(char)
            self._expected = "key" if char == "{" else "item"
            return 1, comma + char
        self._comma = comma
        return self._read_scalar(text, place)

    def _read_scalar(self, text: str, place: int) -> tuple[int, str]:
        match = _SCALAR.match(text, place)
        assert match is not None
        if len(match[0]) > _MAX_SCALAR:
            return self._fail()
        if match.end() == len(text):
            return 0, ""  # it may continue
        word = _WORDS.get(match[0]) or _PYTHON_WORDS.get(match[0])
        if word is None and _NUMBER.fullmatch(match[0]) and _is_finite(match[0]):
            word = match[0]
        if word is None:
            return self._fail()
        comma, self._comma = self._comma, ""
        self._end_value()
        return len(match[0]), comma + word

    def _close(self, char: str) -> tuple[int, str]:
        expected = ("next", "key") if char == "}" else ("next", "item")
        opening = "{" if char == "}" else "["
        if self._expected not in expected or not self._open or self._open[-1] != opening:
            return self._fail()
        self._open.pop()
        self._comma = ""
        self._end_value()
        return 1, char

    def _take_comma(self) -> tuple[int, str]:
        self._comma = ","
        self._expected = "key" if self._open[-1] == "{" else "item"
        return 1, ""

    def _end_value(self) -> None:
        self._expected = "next"
        self.done = not self._open

    def _fail(self) -> tuple[int, str]:
        self.failed = True
        return 0, self._comma


def _is_finite(number: str) -> bool:
    """Whether a number can be read as a float, which parsers of clients do; integers always."""
    return number.lstrip("-").isdigit() or math.isfinite(float(number))


def _read_escape(text: str, place: int) -> tuple[int, str]:
    """Read an escape of a string. Returns (0, "") if more text is needed."""
    following = text[place + 1 : place + 2]
    if not following:
        return 0, ""
    if following == "u":
        return _read_unicode_escape(text, place)
    if following == "'":
        return 2, following
    return (2, "\\" + following) if following in '"\\/bfnrt' else (1, "\\\\")


def _read_unicode_escape(text: str, place: int) -> tuple[int, str]:
    """Read `\\uXXXX`, or a surrogate pair of two. Half a pair becomes U+FFFD."""
    match = _UNICODE_ESCAPE.match(text, place)
    assert match is not None
    if len(match[0]) < 6:
        return (0, "") if match.end() == len(text) else (1, "\\\\")
    code = int(match[0][2:], 16)
    if not 0xD800 <= code <= 0xDFFF:
        return 6, match[0]
    if code < 0xDC00:
        low = _LOW_SURROGATE_ESCAPE.match(text, place + 6)
        assert low is not None
        if len(low[0]) == 6:
            return 12, match[0] + low[0]
        if low.end() == len(text):
            return 0, ""
    return 6, "\\ufffd"
