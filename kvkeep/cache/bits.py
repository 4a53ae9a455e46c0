"""In how many bits a session's cells are kept."""

from dataclasses import dataclass, replace

from kvkeep.cache.block import Layout

PLAIN = (16, 16)
BITS = {"8": (8, 8), "8/4": (8, 4), "4": (4, 4)}  # of keys, and of values


@dataclass(frozen=True)
class Bits:
    """None: cells are kept as they were evaluated.

    kv: of all cells. far: of all that lie in no window. At most one of them is given, as a key of
    `BITS`.
    """

    kv: str | None = None
    far: str | None = None

    def layouts(self, plain: Layout) -> tuple[Layout, Layout]:
        """Of the window's cells, and of all others."""
        return _kept_in(plain, self.kv), _kept_in(plain, self.far or self.kv)


def _kept_in(plain: Layout, bits: str | None) -> Layout:
    keys, values = PLAIN if bits is None else BITS[bits]
    return replace(plain, key_bits=keys, value_bits=values)
