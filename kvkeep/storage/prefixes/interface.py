"""The interface of prefix caches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint


@dataclass(frozen=True)
class PrefixMatch:
    """The result of a lookup.

    keys, values: `[layers, kv_heads, 256, head_dim]` for each matching block, verified.
    differs_at: the first token at which the nearest stored prompt differs or ends; None if all
    whole blocks of the prompt were found.
    """

    keys: list[Tensor]
    values: list[Tensor]
    differs_at: int | None

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * len(self.keys)


@runtime_checkable
class PrefixCache(Protocol):
    """A cache of the cells of prompts, in blocks of 256 tokens.

    It only saves prefill work: a session is correct without it, and whatever it loses.
    """

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest stored prefix of a prompt, in whole blocks. Raises StoreError."""

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> int:
        """Store the blocks of a prompt from token `start` on; return how many tokens are stored.

        blocks: keys and values `[layers, kv_heads, 256, head_dim]`. Raises StoreError.
        """
