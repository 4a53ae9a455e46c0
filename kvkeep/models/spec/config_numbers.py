"""Numbers of a config, as they have to be: whole or positive, and not beyond all measure."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile

LARGEST = 1 << 40  # of any size or length in a config


def count(config: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """A field from 1 up. Raises BadModelFile for one that is none, or missing without a default."""
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


def whole(config: Mapping[str, Any], key: str, path: Path, default: int) -> int:
    """As `count`, from 0 up."""
    stated = config.get(key)
    return 0 if (default if stated is None else stated) == 0 else count(config, key, path, default)


def positive(config: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    """A number above 0. Raises BadModelFile."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadModelFile(
            f"{path}: {key} must be a positive number, found {value!r}; fetch the model again"
        )
    return float(value)
