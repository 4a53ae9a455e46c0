"""Validation of public arguments, which are converted to plain Python values.

Numbers of numpy and torch compute and compare like Python's, but they overflow, cannot be written
into a file, and turn what they are combined with into other types. So they are converted on entry,
or refused, before anything changes.
"""

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.errors import InvalidArgument

T = TypeVar("T")

Word = TypeVar("Word", bound=str)


def whole(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return a whole number, of Python, numpy or torch; no bool, and no float.

    minimum, maximum: the range, both ends included; None for no end. Raises InvalidArgument.
    """
    if isinstance(value, bool):
        raise _refused(name, "a whole number", value)
    try:
        found = operator.index(value)
    except TypeError:
        raise _refused(name, "a whole number", value) from None
    if (minimum is not None and found < minimum) or (maximum is not None and found > maximum):
        raise _refused(name, _range(minimum, maximum), found)
    return found


def optional_whole(name: str, value: Any, minimum: int | None = None) -> int | None:
    """Return what `whole` returns; None for None."""
    return None if value is None else whole(name, value, minimum)


def number(name: str, value: Any) -> float:
    """Return a finite number as a float; no bool and no text. Raises InvalidArgument."""
    if isinstance(value, (bool, str, bytes)) or type(value).__name__ in ("bool", "bool_"):
        raise _refused(name, "a number", value)
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise _refused(name, "a number", value) from None
    if not math.isfinite(found):
        raise _refused(name, "a finite number", value)
    return found


def flag(name: str, value: Any) -> bool:
    """Return True or False, numpy's too. Raises InvalidArgument."""
    if isinstance(value, bool) or type(value).__name__ == "bool":  # numpy's is not Python's
        return bool(value)
    raise _refused(name, "True or False", value)


def text(name: str, value: Any) -> str:
    """Return text that can be encoded. Raises InvalidArgument, also for lone surrogates."""
    if not isinstance(value, str):
        raise _refused(name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} holds half of a character, {value[error.start]!r} at index {error.start}, "
            'which no encoding has: decode the bytes that it came from with errors="replace"'
        ) from None
    return str(value)


def one_of(name: str, value: Word, choices: Collection[str]) -> Word:
    """Return one of a few words. Raises InvalidArgument, naming all of them."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}; found {value!r}")
    return value


def path(name: str, value: Any) -> Path:
    """Return a file system path. Raises InvalidArgument."""
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        raise _refused(name, "a path", value)
    return Path(value)


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return the value if it is an instance of `kind`. Raises InvalidArgument."""
    if not isinstance(value, kind):
        raise _refused(name, f"a {kind.__name__}", value)
    return value


def progress(value: Any) -> Callable[[int], None] | None:
    """Return a progress callback, or None. Raises InvalidArgument."""
    if value is not None and not callable(value):
        raise _refused("progress", "something to call with a number, or None", value)
    return value  # type: ignore[no-any-return]


def token_ids(name: str, value: Any, vocabulary: int) -> list[int]:
    """Return token ids: from a list, an array or a tensor of whole numbers below `vocabulary`.

    Raises InvalidArgument, naming the first invalid one.
    """
    if isinstance(value, (str, bytes, bytearray, dict, set, frozenset)) or not (
        isinstance(value, Iterable) or hasattr(value, "tolist")
    ):
        raise _refused(name, "text or a sequence of token ids", value)
    # Arrays and tensors give Python's numbers all at once; one of no dimension gives a number.
    found = value.tolist() if hasattr(value, "tolist") else list(value)
    if not isinstance(found, list):
        raise _refused(name, "a sequence of token ids", value)
    for index, token in enumerate(found):
        if type(token) is not int:
            token = found[index] = whole(f"{name}[{index}]", token)
        if not 0 <= token < vocabulary:
            raise InvalidArgument(
                f"token ids must be 0 to {vocabulary - 1}; found {token} at index {index}"
            )
    return found


def _range(minimum: int | None, maximum: int | None) -> str:
    if maximum is None:
        return f"{minimum} or more"
    return f"up to {maximum}" if minimum is None else f"{minimum} to {maximum}"


def _refused(name: str, expected: str, found: object) -> InvalidArgument:
    return InvalidArgument(f"{name} must be {expected}; found {found!r}")
