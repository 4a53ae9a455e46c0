"""A prefix store whose hits end at prefill steps, so that reuse changes no bit of an answer."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from kvkeep.storage.prefixes.interface import PrefixCache, PrefixMatch
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint


class WholeSteps:
    """A `PrefixCache` that truncates hits to the end of a prefill step.

    The rest of a prompt is then evaluated in the same steps as without a store. Blocks behind that
    end are evaluated again, since a step of the uncached prompt would begin within them. There
    are no hits where no multiple of the step within the prompt is one of a block (256 tokens), too.

    step: the prefill step of the session, in tokens.
    """

    def __init__(self, store: PrefixCache, step: int):
        self._store, self._step = store, step

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest stored prefix that ends at a step. Raises StoreError."""
        found = self._store.find(fingerprint, tokens)
        count = len(found.keys)
        while count * BLOCK_TOKENS % self._step:
            count -= 1
        return PrefixMatch(found.keys[:count], found.values[:count], found.differs_at)

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> int:
        """Store the blocks, all of them. Raises StoreError."""
        return self._store.add(fingerprint, tokens, start, blocks)
