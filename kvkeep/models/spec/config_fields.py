"""Reading a model's JSON files, and checked numbers from their fields."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.storage.files.text import ENCODING

LARGEST = 1 << 40  # the largest size, length or token id that a config may state


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises BadModelFile if the file is unreadable, empty, not JSON or not an object.
    """
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


def positive_int(
    config: Mapping[str, Any], key: str, path: Path, default: int | None = None
) -> int:
    """Return a field as a whole number from 1 to `LARGEST`.

    Raises BadModelFile for any other value, and for a missing field without a default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise BadModelFile(f"{path} lacks the field {key}; fetch the model again")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise BadModelFile(
            f"{path}: {key} must be a whole number of at least 1 and at most {LARGEST}, found "
            f"{value!r}; fetch the model again"
        )
    return value


def non_negative_int(config: Mapping[str, Any], key: str, path: Path, default: int) -> int:
    """Return a field as a whole number from 0 to `LARGEST`. Raises BadModelFile."""
    value = config.get(key)
    if (default if value is None else value) == 0:
        return 0
    return positive_int(config, key, path, default)


def positive_float(config: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    """Return a field as a finite number above 0. Raises BadModelFile."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadModelFile(
            f"{path}: {key} must be a positive number, found {value!r}; fetch the model again"
        )
    return float(value)
