"""In how many bits a session's cells are kept."""

import operator
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.cache.block import Layout

PLAIN = (16, 16)
BITS = {"8": (8, 8), "8/4": (8, 4), "4": (4, 4)}  # of keys, and of values


def bits_name(value: Any) -> Any:
    """The integer 8 as "8", of Python, numpy or torch; any other value as it is."""
    if value is None or isinstance(value, (str, bool)):
        return value
    try:
        return str(operator.index(value))
    except TypeError:
        return value


@dataclass(frozen=True)
class Bits:
    """None: cells are kept as they were evaluated.

    kv: of all cells. far: of all that lie in no window. At most one of them is given, as a key of
    `BITS`; the integers 8 and 4 stand for "8" and "4".
    """

    kv: str | None = None
    far: str | None = None

    def __post_init__(self) -> None:
        for name in ("kv", "far"):
            object.__setattr__(self, name, bits_name(getattr(self, name)))

    def layouts(self, plain: Layout) -> tuple[Layout, Layout]:
        """Of the window's cells, and of all others."""
        return _kept_in(plain, self.kv), _kept_in(plain, self.far or self.kv)


def _kept_in(plain: Layout, bits: str | None) -> Layout:
    keys, values = PLAIN if bits is None else BITS[bits]
    return replace(plain, key_bits=keys, value_bits=values)
