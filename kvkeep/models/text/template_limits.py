"""Bounds on the work, the values and the output of a chat template, which is not trusted."""

import json
import re
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from jinja2 import TemplateRuntimeError

MAX_ITERATIONS = 300_000  # of all loops together, numbers in ranges included
MAX_SIZE = 20_000_000  # characters or items of a value, and of the output; also the largest number
MAX_CREATED = 1_000_000_000  # characters and items of all values together
_MAX_FORMAT_LENGTH = 1000
# A width or precision of four digits or from an argument, in both kinds of format strings.
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(?:\d{4}|\*)|[:.][^{}]*\d{4}|\{[^{}]*\{")
_MAX_WIDTH = 1000  # of an indentation


class RenderingBudget:
    """Counts what one rendering takes. Raises TemplateRuntimeError if it is too much."""

    def __init__(self) -> None:
        self._iterations = self._created = 0

    def count_iterations(self, count: int) -> bool:
        self._iterations += count
        if self._iterations > MAX_ITERATIONS:
            raise TemplateRuntimeError(f"it loops more than {MAX_ITERATIONS:,} times")
        return True  # a loop's condition continues with `and`

    def count_created(self, value: Any) -> Any:
        """Count a value that the template created, and return it."""
        if isinstance(value, (str, list, tuple)):
            if len(value) > MAX_SIZE:
                raise TemplateRuntimeError("it creates too large a value")
            self._created += len(value)
            if self._created > MAX_CREATED:
                raise TemplateRuntimeError("it creates too many large values")
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise TemplateRuntimeError("it creates too large a number")
        return value

    def join(self, parts: Iterable[Any]) -> str:
        """Join texts, such as the parts of the output. Takes no more memory than allowed."""
        texts, size = [], 0
        for part in parts:
            text = part if isinstance(part, str) else str(checked_text(part))
            size += len(text)
            if size > MAX_SIZE:
                raise TemplateRuntimeError("it writes too long a text")
            texts.append(text)
        return str(self.count_created("".join(texts)))


def text_size(value: Any) -> int:
    """Return about how many characters a value has as text. Raises if they are too many."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
            size += 4 * len(item)
        elif isinstance(item, (list, tuple, set)):
            stack += item
            size += 2 * len(item)
        else:
            size += 8
        if size > MAX_SIZE:
            raise TemplateRuntimeError("it writes too large a value")
    return size


def checked_text(value: Any) -> Any:
    """Return a value that is about to become text. Raises if the text would be too long."""
    if not isinstance(value, str):
        text_size(value)
    return value


def check_integers(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_SIZE for value in values):
        raise TemplateRuntimeError("it uses too large a number")


def check_repetition(left: Any, right: Any) -> None:
    for sequence, factor in ((left, right), (right, left)):
        is_repetition = isinstance(sequence, Sized) and isinstance(factor, int)
        if is_repetition and len(sequence) * abs(factor) > MAX_SIZE:
            raise TemplateRuntimeError("it repeats a value too often")


def check_format(text: str, arguments: Any) -> None:
    """Check the formatting of a text with arguments, by `%` or `format`."""
    if len(text) > _MAX_FORMAT_LENGTH or _WIDE_FORMAT.search(text):
        raise TemplateRuntimeError("its format string makes too long a text")
    _check_product(text.count("%") + text.count("{"), text_size(arguments))


def check_operation(name: str, subject: Any, arguments: list[Any]) -> None:
    """Check a filter or method whose result may be much larger than its arguments."""
    if name == "join":
        is_method = isinstance(subject, str) and arguments and not isinstance(arguments[0], str)
        items, separator = (arguments[0], subject) if is_method else (subject, arguments)
        count = len(items) if isinstance(items, Sized) else 0
        text_size(items)
        _check_product(count, text_size(separator))
    elif name in ("sum", "string"):
        text_size(subject)
    elif name in ("format", "format_map"):
        check_format(str(subject), arguments)
    elif name == "replace" and len(arguments) > 1:
        text, old, new = str(checked_text(subject)), str(arguments[0]), str(arguments[1])
        _check_product(text.count(old), len(new))
    elif name in ("indent", "expandtabs"):
        if any(isinstance(value, int) and value > _MAX_WIDTH for value in arguments):
            raise TemplateRuntimeError("it uses too wide an indentation")
        lines = text_size(subject) if not isinstance(subject, str) else len(subject.split("\n"))
        tabs = subject.count("\t") if isinstance(subject, str) else 0
        width = max((v for v in arguments if type(v) is int), default=8)
        _check_product(lines + tabs, max(width, text_size(arguments)))


def bounded_json(value: Any, encoder: json.JSONEncoder) -> str:
    """Encode a value as JSON. Takes no more memory than allowed."""
    parts, size = [], 0
    for part in encoder.iterencode(value):
        size += len(part)
        if size > MAX_SIZE:
            raise TemplateRuntimeError("it writes too long a text")
        parts.append(part)
    return "".join(parts)


def _check_product(count: int, size: int) -> None:
    if count * size > MAX_SIZE:
        raise TemplateRuntimeError("it creates too large a value")
