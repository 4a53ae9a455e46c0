"""The pins and kept tokens of a text that became another one: those of the tokens that stay.

A token stays where the texts are equal, whether its cell is moved or it is evaluated again. New
tokens are pinned or kept between tokens that are, or in place of them, as by an edit; those that
end the text are neither, as by a rewind and a prompt.

    pinned:   - - P P P P - -          the second and third P replaced by X X X
    aligned:  - - P X X X P - -        all of P X X X P are pinned
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from kvkeep.session.alignment import SINKS, Change
from kvkeep.session.memory import Memory
from kvkeep.session.spans import span_after_edit

_END_TOKENS = 8  # fewer tokens after a change may be equal by chance: it is of the text's end


@dataclass(frozen=True)
class Retained:
    """The tokens of an aligned text that are never evicted.

    pinned: whether each token is pinned. keep: how many of the first ones are kept; None if the
    policy evicts none.
    """

    pinned: Sequence[bool]
    keep: int | None

    @classmethod
    def after(cls, memory: Memory, changes: Iterable[Change], keep: int) -> Self:
        """Return what changes of a memory's text leave of its pins.

        changes: each as the text is after those before it. keep: of the aligned text. Raises
        InvalidArgument if the policy has no room for them.
        """
        pinned = _pins_after(memory, changes)
        if memory.policy.room(memory.cache) is not None:  # it evicts nothing
            return cls(pinned, None)
        memory.policy.with_settings(keep=keep).check(sum(pinned[keep:]))
        return cls(pinned, keep)

    def apply(self, memory: Memory) -> None:
        """Pin and keep the tokens in a memory that has the aligned text, or its beginning."""
        pairs = zip(memory.serials, self.pinned, strict=False)
        memory.set_pins({serial for serial, is_pinned in pairs if is_pinned}, self.keep)


def keep_after(memory: Memory, changes: Iterable[Change], min_keep: int = 0) -> int:
    """Return how many first tokens are kept after changes of a memory's text: `min_keep` or more.

    Tokens that come between kept ones, or replace them by more, are kept as well. Not so with
    attention sinks alone, which only the beginning of a text can be.
    """
    keep, held = memory.policy.keep, set(memory.cache.serials())
    kept = [index for index, serial in enumerate(memory.serials) if serial in held][:keep]
    if keep <= SINKS or not kept:
        return max(keep, min_keep)
    old_end, total = kept[-1] + 1, len(memory.tokens)
    new_end = old_end
    for start, end, added_count in changes:
        if not _ends_text(end, total):
            _, new_end = span_after_edit((0, new_end), start, end, added_count)
        total += added_count - (end - start)
    return max(keep + new_end - old_end, keep, min_keep)


def _pins_after(memory: Memory, changes: Iterable[Change]) -> list[bool]:
    """Return for each token whether it is pinned after changes of a memory's text."""
    pinned = [serial in memory.pins for serial in memory.serials]
    for start, end, added_count in changes:
        replaced, neighbours = pinned[start:end], pinned[max(0, start - 1) : start + 1]
        is_inside = all(replaced) if replaced else len(neighbours) == 2 and all(neighbours)
        is_pinned = is_inside and not _ends_text(end, len(pinned))
        pinned[start:end] = [is_pinned] * added_count
    return pinned


def _ends_text(end: int, total: int) -> bool:
    """Whether a change up to token `end` of `total` is of the text's end."""
    return total - end < _END_TOKENS
