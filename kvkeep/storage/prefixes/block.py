"""The interface of prefix caches, and their blocks: the cells of 256 tokens of a prompt."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.layout import Layout
from kvkeep.errors import StoreError
from kvkeep.storage.prefixes.coding import BlockCoding
from kvkeep.storage.prefixes.inventory import BLOCK_FORMAT, BLOCK_KIND, BLOCK_TOKENS
from kvkeep.storage.snapshots.container import Container, read_container
from kvkeep.storage.snapshots.fingerprint import Fingerprint

BlockCells: TypeAlias = tuple[Tensor, Tensor]  # keys, values: `[layers, kv_heads, 256, head_dim]`
BlockStream: TypeAlias = Iterable[BlockCells]
MAX_COMPARED_BLOCKS = 4  # stored blocks read to find where a prompt differs from them


@dataclass(frozen=True)
class PrefixMatch:
    """The result of a lookup: the cells of each matching block.

    differs_at: the index of the first token that the nearest stored prompt lacks or has otherwise,
    of a few that continue after the blocks found; None if all whole blocks were found. checkpoint:
    after the last block, for models that need one; blocks behind the newest usable one are left
    out. stored_tokens: of the prompt, those included. rounded: the codec by which the cells were
    rounded, or "".
    """

    blocks: Sequence[BlockCells]
    differs_at: int | None
    checkpoint: Checkpoint | None = None
    stored_tokens: int = 0
    rounded: str = ""

    @property
    def token_count(self) -> int:
        return BLOCK_TOKENS * len(self.blocks)


@dataclass(frozen=True)
class CheckpointNeed:
    """The checkpoints that a model with local layers or states can continue from.

    local_layout: of the cells in them; None for a model without local layers. check: raises
    ValueError for one that is not of this model. step: they must be after a multiple of so many
    tokens.
    """

    local_layout: Layout | None
    check: Callable[[Checkpoint], None]
    step: int = 1


@runtime_checkable
class PrefixCache(Protocol):
    """A cache of the cells of prompts, in blocks of 256 tokens. It may lose any of them.

    An engine calls `find` in several threads at once, also during `add`. All methods raise
    StoreError.
    """

    def find(
        self, fingerprint: Fingerprint, tokens: Sequence[int], need: CheckpointNeed | None = None
    ) -> PrefixMatch:
        """Return the longest stored prefix of a prompt, in whole blocks.

        need: for a prefix that ends at a checkpoint; None for models that need none.
        """

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: BlockStream,
        checkpoint: Checkpoint | None = None,
        kept_ends: Collection[int] = (),
    ) -> int:
        """Store the blocks of a prompt from token `start` on; return how many tokens are stored.

        checkpoint: after the last token, stored with the last block. kept_ends: after which tokens
        of the prompt checkpoints are kept; others may be removed, except where texts branch.
        """


@dataclass(frozen=True)
class PrefixBlock:
    """A block of a prompt, stored or not."""

    parent: str  # the key of the block before it, or the digest of the model
    key: str  # a hash over the model's digest and all tokens up to the block's end
    start: int  # the index of its first token in the prompt
    tokens: Tensor  # [256] int32

    @property
    def end(self) -> int:
        """The index of the token after its last one."""
        return self.start + BLOCK_TOKENS

    def tensors_of(self, cells: BlockCells, coding: BlockCoding | None) -> dict[str, Tensor]:
        """Return the tensors to store. coding: of rounded cells."""
        if coding is not None:
            return {"tokens": self.tokens, **coding.encode(cells, self.start)}
        return {"tokens": self.tokens, "keys": cells[0].cpu(), "values": cells[1].cpu()}

    def cells_from(
        self, container: Container, fingerprint: Fingerprint, coding: BlockCoding | None
    ) -> BlockCells | None:
        """Return a file's keys and values; None unless they fit this block's tokens and the model.

        container: the content of the file. The caller verifies that it was written under this key.
        """
        if container_tokens(container) != self.tokens.tolist():
            return None
        tensors = container.tensors
        cells = _cells_of(tensors) if coding is None else coding.decode(tensors, self.start)
        return cells if cells is not None and _fit(cells, fingerprint) else None

    def is_of(
        self, container: Container, fingerprint: Fingerprint, coding: BlockCoding | None
    ) -> bool:
        """Whether a file is that of this block; see `cells_from`. Rounded cells stay coded."""
        if coding is None:
            return self.cells_from(container, fingerprint, None) is not None
        is_same_text = container_tokens(container) == self.tokens.tolist()
        return is_same_text and coding.fits(container.tensors)


def _cells_of(tensors: Mapping[str, Tensor]) -> BlockCells | None:
    """Return the exact cells of a file; None if it has none."""
    if "keys" in tensors and "values" in tensors:
        return tensors["keys"], tensors["values"]
    return None


def _fit(cells: BlockCells, fingerprint: Fingerprint) -> bool:
    """Whether cells are a block of a model's."""
    return all(fingerprint.matches_cells(t) and t.shape[2] == BLOCK_TOKENS for t in cells)


def blocks_of(
    tokens: Sequence[int], root: str, compute_key: Callable[[str, Tensor], str]
) -> list[PrefixBlock]:
    """Return the whole blocks of a prompt.

    root: the first block's parent. compute_key: makes a key from the parent's key and the tokens.
    """
    blocks = list[PrefixBlock]()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        ids = torch.tensor(tokens[start : start + BLOCK_TOKENS], dtype=torch.int32, device="cpu")
        parent = blocks[-1].key if blocks else root
        blocks.append(PrefixBlock(parent, compute_key(parent, ids), start, ids))
    return blocks


def first_difference(
    missing: Sequence[PrefixBlock],
    tokens: Sequence[int],
    longest_child_prefix: Callable[[str, Sequence[int]], int],
) -> int | None:
    """Return `PrefixMatch.differs_at`: where the nearest stored prompt differs, or None.

    missing: the blocks that a lookup did not find. tokens: of the whole prompt.
    longest_child_prefix: returns how many of some tokens a stored child of a block, given by its
    key, begins with.
    """
    if not missing:
        return None
    start = missing[0].start
    return start + longest_child_prefix(missing[0].parent, tokens[start:])


def block_format(coding: BlockCoding | None) -> int:
    """Return the oldest format whose readers know a block."""
    return 1 if coding is None else BLOCK_FORMAT


def block_key(parent: str, tokens: Tensor) -> str:
    return blake3(parent.encode() + tokens.numpy().tobytes()).hexdigest()[:32]


def read_block(path: Path, key: str, names: tuple[str, ...] | None = None) -> Container | None:
    """Read a block's file; None unless it is intact and was written under the key.

    names: of the tensors to read; None for all. Blocks of early versions have no key in the
    document, and count as missing: equal tokens after different parents could not be told apart.
    """
    return read_keyed(path, key, BLOCK_KIND, BLOCK_FORMAT, names)


def read_keyed(
    path: Path, key: str, kind: str, max_format: int, names: tuple[str, ...] | None = None
) -> Container | None:
    """Read a file of a block, of any kind; None unless it is intact and has the block's key."""
    try:
        container = read_container(path, kind, max_format, names)
    except StoreError:
        return None
    return container if container.document.get("key") == key else None


def read_tokens(path: Path) -> list[int]:
    """Return the tokens in a block's file without reading its cells; [] if they do not verify."""
    key = path.stem.partition("-")[2]  # of PARENT-KEY
    container = read_block(path, key, names=("tokens",))
    return [] if container is None else container_tokens(container)


def container_tokens(container: Container) -> list[int]:
    """Return a block's tokens; [] if they are not as kvkeep writes them."""
    tokens = container.tensors.get("tokens")
    if tokens is None or tokens.dtype != torch.int32 or tokens.shape != (BLOCK_TOKENS,):
        return []
    return list[int](tokens.tolist())


def common_prefix_length(stored: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many first tokens of a stored block and a text are equal."""
    pairs = enumerate(zip(stored, tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(stored), len(tokens)))
