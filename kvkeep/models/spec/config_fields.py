"""Reading a model's JSON files, and checked numbers from their fields."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.storage.files.text import ENCODING

MAX_INTEGER = 1 << 40  # the largest size, length or token id that a config may state


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises BadModelFile for a file that is unreadable, empty or other."""
    try:
        text = path.read_text(encoding=ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(f"{path} cannot be read ({error}); fetch the model again") from error
    if not text.strip():
        raise BadModelFile(f"{path} is empty; fetch the model again")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise BadModelFile(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise BadModelFile(
            f"{path} holds a JSON {type(value).__name__}, not an object; fetch the model again"
        )
    return value


@dataclass(frozen=True)
class ConfigFields:
    """The fields of a config.json, with the defaults of the model's family.

    Accessors treat null like a missing field, and raise BadModelFile for a missing field without a
    default and for values of another kind.

    path: of the file, for messages.
    """

    values: Mapping[str, Any]
    path: Path

    def get(self, field: str, default: Any = None) -> Any:
        return self.values.get(field, default)

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return these fields with some values replaced or added."""
        return replace(self, values={**self.values, **values})

    @property
    def num_layers(self) -> int:
        return self.positive_int("num_hidden_layers")

    def positive_int(self, field: str, default: int | None = None) -> int:
        """Return a field as a whole number from 1 to `MAX_INTEGER`."""
        value = default if self.get(field) is None else self.get(field)
        if value is None:
            raise BadModelFile(f"{self.path} lacks the field {field}; fetch the model again")
        if not is_valid_integer(value, minimum=1):
            expected = f"a whole number of at least 1 and at most {MAX_INTEGER}"
            raise self.invalid_error(field, expected)
        return int(value)

    def non_negative_int(self, field: str, default: int) -> int:
        """Return a field as a whole number from 0 to `MAX_INTEGER`."""
        value = default if self.get(field) is None else self.get(field)
        return 0 if value == 0 else self.positive_int(field, default)

    def positive_float(self, field: str, default: float) -> float:
        """Return a field as a finite number above 0; the default is not checked."""
        value = self.get(field)
        if value is None:
            return default
        if not is_positive_number(value):
            raise self.invalid_error(field, "a positive number")
        return float(value)

    def invalid_error(self, field: str, expected: str) -> BadModelFile:
        """Return the error for a field's value. expected: what would be valid."""
        return BadModelFile(
            f"{self.path}: {field} must be {expected}, found {self.get(field)!r}; "
            "fetch the model again"
        )

    def unsupported_error(self, reason: str) -> UnsupportedModel:
        """Return the error for a variant that no published model has."""
        return UnsupportedModel(
            f"{self.path}: {reason}, which is not supported; use a published model of the family"
        )


def is_positive_number(value: Any) -> bool:
    """Whether a value of a config is above 0 and at most the largest float: JSON has no limit."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def is_valid_integer(value: object, minimum: int) -> bool:
    """Whether a value of a config is a whole number from `minimum` to `MAX_INTEGER`."""
    return type(value) is int and minimum <= value <= MAX_INTEGER
