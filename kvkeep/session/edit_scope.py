"""The scope of an edit: the tokens that it replaces, and whether new ones are kept or pinned."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.errors import InvalidArgument
from kvkeep.session.memory import Memory


@dataclass(frozen=True)
class EditScope:
    """The tokens that an edit replaces by `ids`, and its effect on what is never evicted.

    growth: how many more tokens there are after the edit. rank: how many held cells lie before it,
    compressed ones not counted. keep: the policy's setting after the edit; None if the policy does
    not evict. pinned: whether the new tokens are pinned. permanent: whether a policy that evicts
    never evicts them.
    """

    start: int
    end: int
    ids: Sequence[int]
    growth: int
    rank: int
    keep: int | None
    pinned: bool
    permanent: bool

    @classmethod
    def locate(cls, memory: Memory, start: int, end: int, ids: Sequence[int]) -> "EditScope":
        """Return the scope of an edit that puts `ids` in place of tokens `start ... end - 1`.

        Tokens that replace kept or pinned ones, or are inserted between two of them, are kept or
        pinned, too. `keep` never shrinks: without its first tokens, a window cannot attend any
        more. Raises InvalidArgument for a range that is out of bounds, or nothing to do.
        """
        serials, held = memory.serials.tolist(), set(memory.cache.serials())
        if not 0 <= start <= end <= len(serials):
            raise InvalidArgument(
                f"an edit needs 0 <= start <= end <= {len(serials)}, the number of tokens; "
                f"found {start} to {end}"
            )
        if start == end and not ids:
            raise InvalidArgument(
                f"nothing to edit: no tokens in {start} to {end}, and none to insert"
            )
        rank, growth = sum(serial in held for serial in serials[:start]), len(ids) - (end - start)
        replaced = serials[start:end] or serials[max(0, start - 1) : start + 1]
        pinned = len(replaced) == (end - start or 2) and memory.pins.issuperset(replaced)
        keep = memory.policy.keep
        if start < len(serials) and rank + max(1, end - start) <= keep:
            keep += max(0, growth)
        if memory.policy.room(memory.cache) is not None:  # it evicts nothing
            return cls(start, end, ids, growth, rank, None, pinned, permanent=False)
        permanent = pinned or rank + len(ids) <= keep
        return cls(start, end, ids, growth, rank, keep, pinned, permanent)
