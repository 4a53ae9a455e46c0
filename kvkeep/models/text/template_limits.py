"""Bounds on the work, the values and the output of a chat template, which is not trusted."""

import json
import re
from collections.abc import Iterable, Mapping, Set, Sized, ValuesView
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

MAX_ITERATIONS = 300_000  # of all loops of a short conversation together
# Templates such as Gemma 4's look through all messages for each. An iteration takes 3 to 5 µs.
_ITERATIONS_OF_PAIR, _MAX_ITERATIONS_OF_LONG = 4, 3_000_000
_ITEMS_READ_AT_ONCE, _CHARACTERS_READ_AT_ONCE = 4, 4096  # in the time of an iteration
MAX_SIZE = 20_000_000  # characters or items of a value, and of the output; also the largest width
MAX_CREATED = 1_000_000_000  # characters and items of all values together
_MAX_FORMAT_LENGTH = 1000
# A width or precision of four digits or from an argument, in both kinds of format strings. Names
# and indices of arguments may hold brackets: there any later number counts, and no brace may be.
_WIDE_FORMAT = re.compile(
    r"%(?:\(.*|[^%a-zA-Z]*)(?:\d{4}|\*)|[:.][^{}]*\d{4}|\{[^{}]*\{|\{[^{}]*\[[^\]]*[{}]",
    re.DOTALL,
)
_MAX_WIDTH = 1000  # of an indentation, and digits of a rounded number
# Filters and methods with arguments that set a size: a width, a number of items or of digits.
_SIZED = frozenset(
    ("center", "expandtabs", "indent", "ljust", "rjust", "round", "truncate", "zfill")
)
# Filters that read all items, though their result may be small.
_READING = frozenset(
    (
        *("dictsort", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr"),
        *("select", "selectattr", "sort", "sum", "unique"),
    )
)
# Those that may compare each character with each of an argument.
_COMPARING_ALL = frozenset(
    ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
)


class RenderingBudget:
    """Counts what one rendering takes. Raises TemplateRuntimeError if it is too much.

    Loops and ranges are counted apart, since most ranges are looped over.
    """

    def __init__(self, message_count: int) -> None:
        for_pairs = _ITERATIONS_OF_PAIR * message_count**2
        self._max_iterations = min(MAX_ITERATIONS + for_pairs, _MAX_ITERATIONS_OF_LONG)
        self._iterations = self._range_numbers = self._created = 0

    def count_iterations(self, count: int) -> bool:
        self._iterations += count
        self._check_iterations(self._iterations)
        return True  # a loop's condition continues with `and`

    def count_range(self, numbers: range) -> range:
        """Count the numbers of a range, and return it."""
        is_small = max(numbers.start, numbers.stop) < MAX_SIZE  # `len` raises for a huge range
        self._range_numbers += len(numbers) if is_small else MAX_SIZE
        self._check_iterations(self._range_numbers)
        return numbers

    def count_operation(self, name: str, subject: Any, arguments: list[Any]) -> None:
        """Count the time of a filter or method that reads more than it creates."""
        if name in ("batch", "slice"):
            self.count_iterations(max((abs(v) for v in arguments if isinstance(v, int)), default=0))
        elif isinstance(subject, str) and name in _COMPARING_ALL:
            self._count_read(
                subject, max((len(v) for v in arguments if isinstance(v, str)), default=1)
            )
        elif isinstance(subject, str) or name in _READING:
            self._count_read(subject)

    def count_searched(self, value: Any) -> Any:
        """Count the items of a value that is compared or searched, and return it."""
        if not isinstance(value, (Mapping, Set)):  # these find an item at once
            self._count_read(value)
        return value

    def _count_read(self, value: Any, times: int = 1) -> None:
        if isinstance(value, Sized):
            is_text = isinstance(value, str)
            at_once = _CHARACTERS_READ_AT_ONCE if is_text else _ITEMS_READ_AT_ONCE
            self.count_iterations(len(value) * times // at_once)

    def _check_iterations(self, count: int) -> None:
        if count > self._max_iterations:
            raise TemplateRuntimeError(f"it loops more than {self._max_iterations:,} times")

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
        elif isinstance(item, (int, float)):
            size += 8
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
            size += 4 * len(item)
        elif isinstance(item, (list, tuple, Set, ValuesView)):
            stack += item
            size += 2 * len(item)
        elif isinstance(item, Namespace):
            raise TemplateRuntimeError("it writes a namespace")
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
    largest = _MAX_WIDTH if name == "round" else MAX_SIZE
    if name in _SIZED and any(isinstance(v, int) and abs(v) > largest for v in arguments):
        raise TemplateRuntimeError("it uses too large a number")
    if name == "join":
        is_method = isinstance(subject, str) and arguments and not isinstance(arguments[0], str)
        items, separator = (arguments[0], subject) if is_method else (subject, arguments)
        count = len(items) if isinstance(items, Sized) else 0
        text_size(items)
        _check_product(count, text_size(separator))
    elif name in ("sum", "string"):
        text_size(subject)
        if name == "sum" and any(isinstance(value, (list, tuple)) for value in arguments):
            raise TemplateRuntimeError("it adds up lists")  # copied for each
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
