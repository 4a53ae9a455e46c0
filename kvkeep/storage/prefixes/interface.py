"""What a session asks of whoever keeps evaluated beginnings of prompts, wherever that is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint


@dataclass(frozen=True)
class PrefixMatch:
    """What a store holds of a prompt.

    keys, values: for each block `[layers, kv_heads, 256, head_dim]`, verified.
    differs_at: the first token at which the nearest stored prompt goes another way, or ends; None
    where all that could be asked for was found.
    """

    keys: list[Tensor]
    values: list[Tensor]
    differs_at: int | None

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * len(self.keys)


@runtime_checkable
class PrefixCache(Protocol):
    """Keeps blocks of 256 evaluated tokens. It saves work, and nothing depends on it."""

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        """The longest beginning of a prompt that is kept, in whole blocks. Raises StoreError."""

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> int:
        """Keeps the blocks of a prompt from token `start` on; how many of its tokens are kept now.

        blocks: keys and values `[layers, kv_heads, 256, head_dim]`. Raises StoreError.
        """
