"""What an edit changes, and what that means for what is never forgotten."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.session.memory import Memory


@dataclass(frozen=True)
class Change:
    """An edit, where it is among what is held, and what it means for what is never forgotten.

    rank: how many held cells lie before it, compressed ones apart. keep: the policy's from now on.
    pinned: whether what is put in is pinned.
    """

    start: int
    end: int
    ids: Sequence[int]
    rank: int
    keep: int
    pinned: bool

    @classmethod
    def of(cls, memory: Memory, start: int, end: int, ids: Sequence[int], rank: int) -> "Change":
        """What is put in the place of kept or pinned tokens, or between two such, is so, too.

        `keep` never shrinks: without its first tokens, a window forgets how to attend.
        """
        around = range(start, end) if end > start else range(start - 1, start + 1)
        inside = bool(around) and around[0] >= 0 and around[-1] < len(memory.tokens)
        pinned = inside and all(memory.serials[index] in memory.pins for index in around)
        keep = memory.policy.keep
        if start < len(memory.tokens) and rank + max(1, end - start) <= keep:
            keep += max(0, len(ids) - (end - start))
        return cls(start, end, ids, rank, keep, pinned)

    @property
    def removed(self) -> int:
        return self.end - self.start

    @property
    def growth(self) -> int:
        return len(self.ids) - self.removed

    @property
    def stays(self) -> bool:
        """Whether what is put in is never forgotten."""
        return self.pinned or self.rank + len(self.ids) <= self.keep


def bounded(memory: Memory) -> bool:
    """Whether a window forgets, so that kept and pinned cells are of another kind."""
    return memory.policy.room(memory.cache) is None
