"""A prefix store as an engine's sessions use it: what they take from it changes no bit."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from kvkeep.store.fingerprint import Fingerprint
from kvkeep.store.prefix_keeper import Found, PrefixKeeper
from kvkeep.store.prefix_names import BLOCK


class WholeSteps:
    """A `PrefixKeeper` of whose blocks no more are found than end where a prefill step does.

    The rest of a prompt is then evaluated in the steps in which it is without a store. Blocks
    behind the last such end are evaluated again, as their first tokens would be in the middle of a
    step.

    step: the prefill step of the session.
    """

    def __init__(self, store: PrefixKeeper, step: int):
        self._store, self._step = store, step

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> Found:
        """As of the store. Raises StoreError."""
        found = self._store.find(fingerprint, tokens)
        count = len(found.keys)
        while count * BLOCK % self._step:
            count -= 1
        return Found(found.keys[:count], found.values[:count], found.differs_at)

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> int:
        """As of the store. Raises StoreError."""
        return self._store.add(fingerprint, tokens, start, blocks)
