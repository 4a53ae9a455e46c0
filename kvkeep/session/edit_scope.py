"""The scope of an edit: the tokens that it replaces, and whether new ones are kept or pinned."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.errors import InvalidArgument
from kvkeep.session.memory import Memory


@dataclass(frozen=True)
class EditScope:
    """The tokens `start ... end - 1` that an edit replaces by `ids`, and which are never evicted.

    growth: how many more tokens there are after the edit. cells_before: how many cells lie before
    it, compressed ones not counted. keep: the policy's setting after the edit, of how many first
    tokens are never evicted; None if the policy evicts none. pinned: whether the new tokens are
    pinned. permanent: whether a policy that evicts never evicts them.
    """

    start: int
    end: int
    ids: Sequence[int]
    growth: int
    cells_before: int
    keep: int | None
    pinned: bool
    permanent: bool

    @classmethod
    def from_range(cls, memory: Memory, start: int, end: int, ids: Sequence[int]) -> "EditScope":
        """Return the scope of an edit that puts `ids` in place of tokens `start ... end - 1`.

        Tokens that replace kept or pinned ones, or are inserted between two of them, are kept or
        pinned, too. `keep` never shrinks: without its first tokens, a window cannot attend any
        more. Raises InvalidArgument for a range that is out of bounds, or nothing to do.
        """
        serials = memory.serials
        if not 0 <= start <= end <= len(serials):
            raise InvalidArgument(
                f"an edit needs 0 <= start <= end <= {len(serials)}, the number of tokens; "
                f"found {start} to {end}"
            )
        if start == end and not ids:
            raise InvalidArgument(
                f"nothing to edit: no tokens in {start} to {end}, and none to insert"
            )
        cells_before = memory.count_exact(0, start)
        growth, keep = len(ids) - (end - start), memory.policy.keep
        neighbours = serials[max(0, start - 1) : start + 1]  # of an insertion
        pin_sources, needed_count = (serials[start:end], 1) if start < end else (neighbours, 2)
        pinned = len(pin_sources) >= needed_count and memory.pins.issuperset(pin_sources)
        if start < len(serials) and cells_before + max(1, end - start) <= keep:
            keep += max(0, growth)
        if memory.policy.room(memory.cache) is not None:  # it evicts nothing
            return cls(start, end, ids, growth, cells_before, None, pinned, permanent=False)
        permanent = pinned or cells_before + len(ids) <= keep
        return cls(start, end, ids, growth, cells_before, keep, pinned, permanent)
