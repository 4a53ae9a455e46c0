"""A block of the prefix store: a file with the cells of 256 tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.errors import StoreError
from kvkeep.storage.prefixes.inventory import BLOCK_SUFFIX, BLOCK_TOKENS
from kvkeep.storage.snapshots.container import Container, read_container, write_container
from kvkeep.storage.snapshots.fingerprint import Fingerprint

KIND, FORMAT = "prefix-block", 1
OVERHEAD = 8192  # bytes that a block's file may need besides its cells


@dataclass(frozen=True)
class PrefixBlock:
    """A block of a prompt, stored or not.

    path: its file, named after the keys of its parent and its own. key: a hash over the model's
    fingerprint and all tokens up to the block's end. start: the index of its first token in the
    prompt.
    """

    path: Path
    key: str
    start: int
    tokens: Sequence[int]

    def read(self, fingerprint: Fingerprint) -> tuple[Tensor, Tensor] | None:
        """Return the block's keys and values, or None unless the file verifies as this block.

        That is: all checksums match, it was written under this key, and its tensors have these
        tokens and the fingerprint's dtype and layout.
        """
        container = _read_verified(self.path, self.key, only=None)
        if container is None or container.tensors["tokens"].tolist() != list(self.tokens):
            return None
        cells = (container.tensors.get("keys"), container.tensors.get("values"))
        for tensor in cells:
            if tensor is None or not fingerprint.describes(tensor):
                return None
            if tensor.shape[2] != BLOCK_TOKENS:
                return None
        return cells  # type: ignore[return-value]

    def write(self, keys: Tensor, values: Tensor) -> int:
        """Write the file atomically, and return its size in bytes. Raises StoreError."""
        token_ids = torch.tensor(self.tokens, dtype=torch.int32, device="cpu")
        tensors = {"keys": keys, "values": values, "tokens": token_ids}
        document = {"start": self.start, "key": self.key}
        return write_container(self.path, KIND, FORMAT, document, tensors)


def blocks_of(
    folder: Path, fingerprint: Fingerprint, tokens: Sequence[int]
) -> tuple[list[PrefixBlock], list[str]]:
    """Return the n whole blocks of a prompt, and n + 1 parent keys.

    `parents[i]` is the parent of block i; the last one would be the parent of the next block.
    """
    parents, blocks = [fingerprint.digest()[:32]], list[PrefixBlock]()
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block_tokens = tokens[end - BLOCK_TOKENS : end]
        key = block_key(parents[-1], block_tokens)
        path = folder / f"{parents[-1]}-{key}{BLOCK_SUFFIX}"
        blocks.append(PrefixBlock(path, key, end - BLOCK_TOKENS, block_tokens))
        parents.append(key)
    return blocks, parents


def block_key(parent: str, tokens: Sequence[int]) -> str:
    """Return the key of a block. parent: its parent's key, or the digest of the model."""
    token_ids = torch.tensor(tokens, dtype=torch.int32, device="cpu")
    return blake3(parent.encode() + token_ids.numpy().tobytes()).hexdigest()[:32]


def tokens_in(path: Path) -> list[int]:
    """Return the tokens in a block's file without reading its cells; [] if they do not verify."""
    container = _read_verified(path, path.stem.partition("-")[2], only=("tokens",))
    return [] if container is None else list[int](container.tensors["tokens"].tolist())


def _read_verified(path: Path, key: str, only: tuple[str, ...] | None) -> Container | None:
    """Read a file; None unless it is intact and was written under the key.

    Blocks of early versions have no key in the document. They count as missing, as equal tokens
    after different parents could not be told apart.
    """
    try:
        container = read_container(path, KIND, FORMAT, only)
    except StoreError:
        return None
    tokens = container.tensors.get("tokens")
    complete = (
        tokens is not None and tokens.dtype == torch.int32 and tokens.shape == (BLOCK_TOKENS,)
    )
    return container if complete and container.document.get("key") == key else None
