"""Validation of public arguments: each function returns an argument as a plain Python value.

Numbers of numpy and torch overflow, cannot be written into a file, and turn what they are combined
with into other types. So they are converted on entry, or refused, before anything changes. All
functions raise InvalidArgument, with the argument's `name` in the message.
"""

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.errors import InvalidArgument

T = TypeVar("T")
StringT = TypeVar("StringT", bound=str)


def integer(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return a whole number from `minimum` to `maximum`; no bool, and no float."""
    if isinstance(value, bool):
        raise _invalid(name, "a whole number", value)
    try:
        result = operator.index(value)
    except TypeError:
        raise _invalid(name, "a whole number", value) from None
    if (minimum is not None and result < minimum) or (maximum is not None and result > maximum):
        raise _invalid(name, _range_text(minimum, maximum), result)
    return result


def optional_integer(name: str, value: Any, minimum: int | None = None) -> int | None:
    return None if value is None else integer(name, value, minimum)


def finite_number(name: str, value: Any) -> float:
    """Return a finite number as a float; no bool and no text."""
    if isinstance(value, (bool, str, bytes)) or type(value).__name__ in ("bool", "bool_"):
        raise _invalid(name, "a number", value)
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise _invalid(name, "a number", value) from None
    if not math.isfinite(result):
        raise _invalid(name, "a finite number", value)
    return result


def flag(name: str, value: Any) -> bool:
    """Return True or False, numpy's too."""
    if isinstance(value, bool) or type(value).__name__ == "bool":  # numpy's is not Python's
        return bool(value)
    raise _invalid(name, "True or False", value)


def text(name: str, value: Any) -> str:
    """Return text that can be encoded: without lone surrogates."""
    if not isinstance(value, str):
        raise _invalid(name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} has a lone surrogate, {value[error.start]!r} at index {error.start}, which "
            'cannot be encoded: decode the original bytes with errors="replace"'
        ) from None
    return str(value)


def one_of(name: str, value: StringT, choices: Collection[str]) -> StringT:
    """Return a string that is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}; found {value!r}")
    return value


def path(name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        raise _invalid(name, "a path", value)
    return Path(value)


def instance(name: str, value: Any, expected: type[T]) -> T:
    if not isinstance(value, expected):
        raise _invalid(name, f"a {expected.__name__}", value)
    return value


def progress(value: Any) -> Callable[[int], None] | None:
    """Return a progress callback, which is called with a number of tokens; or None."""
    if value is not None and not callable(value):
        raise _invalid("progress", "a callable that takes a number, or None", value)
    return value  # type: ignore[no-any-return]


def items(name: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a list or of any other iterable but text."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _invalid(name, "a list", value)
    return tuple(value)


def token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """Return token ids from a list, an array or a tensor of whole numbers below `vocab_size`."""
    if isinstance(value, (str, bytes, bytearray, dict, set, frozenset)) or not (
        isinstance(value, Iterable) or hasattr(value, "tolist")
    ):
        raise _invalid(name, "text or a sequence of token ids", value)
    # `tolist` of an array or tensor without a dimension returns a number.
    ids = value.tolist() if hasattr(value, "tolist") else list(value)
    if not isinstance(ids, list):
        raise _invalid(name, "a sequence of token ids", value)
    for index, token in enumerate(ids):
        if type(token) is not int:
            token = ids[index] = integer(f"{name}[{index}]", token)
        if not 0 <= token < vocab_size:
            raise InvalidArgument(
                f"token ids must be 0 to {vocab_size - 1}; found {token} at index {index}"
            )
    return ids


def _range_text(minimum: int | None, maximum: int | None) -> str:
    if maximum is None:
        return f"{minimum} or more"
    return f"up to {maximum}" if minimum is None else f"{minimum} to {maximum}"


def _invalid(name: str, expected: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{name} must be {expected}; found {value!r}")
