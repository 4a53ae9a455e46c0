"""The checkpoints of a session: which are kept, within a number of bytes.

A checkpoint is taken before each prompt, at the boundary of a message, and at the end of each whole
prefill step. The newest three are kept. Further back, a checkpoint is dropped if the two beside it
are no further from each other than the younger one is from the newest: of 4,000 tokens in steps of
128, those after 128, 1152, 2176, 2688, 3200, 3456, 3712, 3840 and 3968 tokens stay. So a prompt
that continues differently after token n needs not much more than the tokens after n to be evaluated
again. A checkpoint at which several texts branch, such as the end of a system prompt, stays. If all
of them take too many bytes, the distances grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkeep.cache.checkpoint import Checkpoint, checkpoint_nbytes

DEFAULT_CHECKPOINT_BYTES = 256_000_000
_DENSE = 3  # of the newest, kept whatever their distances
_MAX_SPARSITY = 2**10  # beyond it, the oldest are dropped


@dataclass(frozen=True)
class Checkpoints:
    """An immutable list of checkpoints of one session, by increasing number of tokens.

    max_bytes: the most that they take. Storage shared with the session's own cells counts as
    theirs, since the next token makes it theirs. branch: after how many tokens another text differs
    from this one, as far as is known; 0 for unknown.
    """

    max_bytes: int = DEFAULT_CHECKPOINT_BYTES
    entries: tuple[Checkpoint, ...] = ()
    branch: int = 0

    def added(self, checkpoint: Checkpoint) -> "Checkpoints":
        """Return the list with a newer checkpoint, thinned."""
        older = [each for each in self.entries if each.num_tokens < checkpoint.num_tokens]
        checkpoint = replace(checkpoint, branches=checkpoint.num_tokens == self.branch)
        return replace(self, entries=tuple(_thinned([*older, checkpoint], self.max_bytes)))

    def limited(self, max_bytes: int) -> "Checkpoints":
        """Return the list with another limit, thinned to it."""
        entries = tuple(_thinned(self.entries, max_bytes))
        return replace(self, max_bytes=max_bytes, entries=entries)

    def first(self, num_tokens: int) -> "Checkpoints":
        """Return those of the first `num_tokens` tokens."""
        entries = tuple(each for each in self.entries if each.num_tokens <= num_tokens)
        return self if len(entries) == len(self.entries) else replace(self, entries=entries)

    def newest(self, num_tokens: int) -> Checkpoint | None:
        """Return the newest one after at most `num_tokens` tokens."""
        entries = self.first(num_tokens).entries
        return entries[-1] if entries else None

    def branched(self, num_tokens: int) -> "Checkpoints":
        """Return the list for a text from which another differs after `num_tokens` tokens."""
        entries = [
            replace(each, branches=each.branches or each.num_tokens == num_tokens)
            for each in self.entries
        ]
        return replace(self, entries=tuple(entries), branch=num_tokens)


def max_checkpoint_count(num_tokens: int, step: int) -> int:
    """Return the most checkpoints that are kept of so many tokens, without those at branches.

    With every second older checkpoint, the distance to the newest doubles.
    """
    return _DENSE + 2 * max(1, num_tokens // step).bit_length()


def _thinned(entries: Sequence[Checkpoint], max_bytes: int) -> list[Checkpoint]:
    """Return the checkpoints to keep: the older they are and the fewer bytes fit, the fewer."""
    sparsity = 1
    kept = _spaced(entries, sparsity)
    while kept and checkpoint_nbytes(kept) > max_bytes:
        sparsity *= 2
        kept = _spaced(kept, sparsity) if sparsity <= _MAX_SPARSITY else kept[1:]
    return kept


def _spaced(entries: Sequence[Checkpoint], sparsity: int) -> list[Checkpoint]:
    """Drop checkpoints from between neighbours that are close enough to each other.

    Close enough are those that are at most `sparsity` times as far apart as the younger one is from
    the newest checkpoint. The oldest and the newest stay, and those at branches.
    """
    kept = list(entries)
    dense_count = max(1, _DENSE // sparsity)
    for index in range(len(kept) - 1 - dense_count, 0, -1):
        younger, older = kept[index + 1].num_tokens, kept[index - 1].num_tokens
        is_close = younger - older <= sparsity * (kept[-1].num_tokens - younger)
        if is_close and not kept[index].branches:
            del kept[index]
    return kept
