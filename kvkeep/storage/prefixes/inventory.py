"""The inventory of a prefix cache, from the names of its files or objects alone.

A block is named after its parent's key and its own: PARENT-KEY.kvblock in a folder, and
prefixes/OWNER/PARENT/KEY.kvblock in an object store. The parent of a prompt's first block is the
digest of its model. So the names form a tree per model, and each leaf is the end of a prompt.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.storage.objects import ObjectStore

BLOCK_TOKENS = 256
BLOCK_SUFFIX = ".kvblock"
_KEY_PREFIX = "prefixes/"


@dataclass(frozen=True)
class StoredBlock:
    """A file or object that holds a block: the cells of 256 tokens of a prompt."""

    parent: str  # the key of the block before it, or the digest of the model
    key: str
    location: str  # the path of its file, or its key in an object store
    nbytes: int
    last_used: float  # seconds since 1970; in an object store, when it was written


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt whose last block has no child in the store."""

    blocks: tuple[StoredBlock, ...]  # from the first on
    unshared_blocks: tuple[StoredBlock, ...]  # those of no earlier prompt of the list

    @property
    def token_count(self) -> int:
        return BLOCK_TOKENS * len(self.blocks)

    @property
    def nbytes(self) -> int:
        """The size of its unshared blocks."""
        return sum(block.nbytes for block in self.unshared_blocks)

    @property
    def last_used(self) -> float:
        return self.blocks[-1].last_used

    @property
    def model_digest(self) -> str:
        """The digest of its model and settings."""
        return self.blocks[0].parent


def prompts_of(all_blocks: Iterable[StoredBlock]) -> list[StoredPrompt]:
    """Return all prompts, the most recently used first.

    A block that several prompts share counts for the first of them. Blocks whose ancestors are
    missing, which no lookup can reach, appear as prompts of another root.
    """
    blocks_by_key = {block.key: block for block in all_blocks}
    parent_keys = {block.parent for block in blocks_by_key.values()}
    leaves = [block for key, block in blocks_by_key.items() if key not in parent_keys]
    counted_keys, prompts = set[str](), list[StoredPrompt]()
    for leaf in sorted(leaves, key=lambda block: block.last_used, reverse=True):
        chain, block = {leaf.key: leaf}, leaf
        # Forged names may form a circle, so it stops at a block that it has.
        while (parent := blocks_by_key.get(block.parent)) and parent.key not in chain:
            chain[parent.key] = block = parent
        prompt_blocks = tuple(reversed(chain.values()))
        unshared = tuple(block for block in prompt_blocks if block.key not in counted_keys)
        counted_keys |= chain.keys()
        prompts.append(StoredPrompt(prompt_blocks, unshared))
    return prompts


def stored_prompts(folder: Path) -> list[StoredPrompt]:
    """Return the prompts in the folder of a prefix store. Raises OSError."""
    return prompts_of(_folder_blocks(folder)) if folder.is_dir() else []


def _folder_blocks(folder: Path) -> Iterator[StoredBlock]:
    with os.scandir(folder) as entries:
        for entry in entries:
            parent, _, key = entry.name.removesuffix(BLOCK_SUFFIX).partition("-")
            if not entry.name.endswith(BLOCK_SUFFIX) or not key:
                continue
            with suppress(FileNotFoundError):  # removed by another process meanwhile
                status = entry.stat()
                yield StoredBlock(parent, key, entry.path, status.st_size, status.st_mtime)


def owner_key_prefix(owner: str) -> str:
    """Return the prefix of the keys of an owner's objects."""
    return f"{_KEY_PREFIX}{owner}/"


def stored_blocks(store: ObjectStore, owner: str | None = None) -> Iterator[StoredBlock]:
    """Yield the blocks of one owner, or of all. Raises StoreError."""
    for info in store.list_objects(_KEY_PREFIX if owner is None else owner_key_prefix(owner)):
        *_, parent, name = info.key.split("/")
        if name.endswith(BLOCK_SUFFIX):
            key = name.removesuffix(BLOCK_SUFFIX)
            yield StoredBlock(parent, key, info.key, info.st_size, info.st_mtime)


def evict_blocks(store: ObjectStore, max_bytes: int) -> tuple[int, int]:
    """Evict blocks of all owners down to a total size; return the bytes freed and remaining.

    The prompt whose end was written first is evicted first, from its end, so that the rest of it
    stays a usable prefix. Raises StoreError.
    """
    blocks = list(stored_blocks(store))
    prompts = prompts_of(blocks)
    reachable = {block.location for prompt in prompts for block in prompt.blocks}
    # Blocks in a circle of forged names belong to no prompt, and are evicted first.
    eviction_order = [block for block in blocks if block.location not in reachable]
    for prompt in reversed(prompts):
        eviction_order += reversed(prompt.unshared_blocks)
    total_bytes, freed_bytes = sum(block.nbytes for block in blocks), 0
    for block in eviction_order:
        if total_bytes - freed_bytes <= max_bytes:
            break
        store.delete(block.location)
        freed_bytes += block.nbytes
    return freed_bytes, total_bytes - freed_bytes
