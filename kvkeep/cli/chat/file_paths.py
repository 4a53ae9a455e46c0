"""Paths of files as they are typed in a chat: in quotes, or with a backslash before each space."""

import re

_PATH = re.compile(r'"([^"]+)"|((?:\\.|\S)+)')
_ESCAPED = re.compile(r"\\(.)")
_SPECIAL = re.compile(r'([\s\\"])')
_OPEN_QUOTE = re.compile(r'"([^"]*)')
_UNQUOTED = re.compile(r'(?!")(?:\\.|\S)*')


def split_path(argument: str) -> tuple[str, str] | None:
    """Return the path at the start of an argument, and the text after it; None without a path."""
    match = _PATH.match(argument)
    if match is None:
        return None
    path = match[1] or _ESCAPED.sub(r"\1", match[2])
    return path, argument[match.end() :].strip()


def unfinished_path(argument: str) -> tuple[str, bool] | None:
    """Return the path that is being typed, and whether it is in quotes; None if it has ended."""
    if match := _OPEN_QUOTE.fullmatch(argument):
        return match[1], True
    if _UNQUOTED.fullmatch(argument):
        return _ESCAPED.sub(r"\1", argument), False
    return None


def escape_path(path: str) -> str:
    """Return a path, or the end of one, as it is typed without quotes."""
    return _SPECIAL.sub(r"\\\1", path)
