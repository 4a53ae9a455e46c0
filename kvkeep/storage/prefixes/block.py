"""A block of the prefix store: the file of 256 evaluated tokens of a prompt."""

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
OVERHEAD = 8192  # bytes that a block's file may need beside its cells


@dataclass(frozen=True)
class PrefixBlock:
    """One of a prompt's blocks, there or not.

    path: named by the keys of the block before it and of its own. key: a hash over the model's
    fingerprint and every token up to its end. start: the place of its first token in the prompt.
    """

    path: Path
    key: str
    start: int
    tokens: Sequence[int]

    def read(self, fingerprint: Fingerprint) -> tuple[Tensor, Tensor] | None:
        """Its keys and values; None unless the file verifies as this very block.

        That is: every byte is as it was written, it was written under this key, and its tensors
        are of these tokens and of this kind of cells.
        """
        found = _verified(self.path, self.key, only=None)
        if found is None or found.tensors["tokens"].tolist() != list(self.tokens):
            return None
        cells = (found.tensors.get("keys"), found.tensors.get("values"))
        for tensor in cells:
            if (
                tensor is None
                or not fingerprint.describes(tensor)
                or tensor.shape[2] != BLOCK_TOKENS
            ):
                return None
        return cells  # type: ignore[return-value]

    def write(self, keys: Tensor, values: Tensor) -> int:
        """Writes the file, or leaves it as it is; its bytes. Raises StoreError."""
        numbers = torch.tensor(self.tokens, dtype=torch.int32, device="cpu")
        tensors = {"keys": keys, "values": values, "tokens": numbers}
        document = {"start": self.start, "key": self.key}
        return write_container(self.path, KIND, FORMAT, document, tensors)


def blocks_of(
    folder: Path, fingerprint: Fingerprint, tokens: Sequence[int]
) -> tuple[list[PrefixBlock], list[str]]:
    """The whole blocks of a prompt; and their parents' keys, with what would follow on the last."""
    parents, blocks = [fingerprint.digest()[:32]], list[PrefixBlock]()
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        tokens_of_it = tokens[end - BLOCK_TOKENS : end]
        key = block_key(parents[-1], tokens_of_it)
        path = folder / f"{parents[-1]}-{key}{BLOCK_SUFFIX}"
        blocks.append(PrefixBlock(path, key, end - BLOCK_TOKENS, tokens_of_it))
        parents.append(key)
    return blocks, parents


def block_key(parent: str, tokens: Sequence[int]) -> str:
    """The key of a block that follows on another, or on a model's digest."""
    numbers = torch.tensor(tokens, dtype=torch.int32, device="cpu")
    return blake3(parent.encode() + numbers.numpy().tobytes()).hexdigest()[:32]


def tokens_in(path: Path) -> list[int]:
    """The tokens of a block's file, without a look at its cells; none if they do not verify."""
    found = _verified(path, path.stem.partition("-")[2], only=("tokens",))
    return [] if found is None else list[int](found.tensors["tokens"].tolist())


def _verified(path: Path, key: str, only: tuple[str, ...] | None) -> Container | None:
    """What a file holds, if it is whole and was written under a key.

    Blocks of earlier versions do not say under which: equal tokens that followed on others look
    the same, so that none of them can be told from another.
    """
    try:
        found = read_container(path, KIND, FORMAT, only)
    except StoreError:
        return None
    tokens = found.tensors.get("tokens")
    whole = tokens is not None and tokens.dtype == torch.int32 and tokens.shape == (BLOCK_TOKENS,)
    return found if whole and found.document.get("key") == key else None
