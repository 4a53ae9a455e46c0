"""What the names of a prefix store's files tell, without a look into them: which prompts it holds.

A block's file is named by the key of the block before it and its own: PARENT-KEY.kvblock. The first
block of a prompt follows on the digest of its model.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.storage.objects import ObjectStore

BLOCK_TOKENS = 256  # tokens
BLOCK_SUFFIX = ".kvblock"


@dataclass(frozen=True)
class StoredBlock:
    """where: its file, or its key in a store of objects. used: seconds since 1970."""

    parent: str
    key: str
    where: str
    nbytes: int
    used: float


@dataclass(frozen=True)
class StoredPrompt:
    """A beginning on which nothing else in the store follows.

    blocks: in order. own: how many of them, at the end, no prompt before it in the list has, too.
    """

    blocks: tuple[StoredBlock, ...]
    own: int

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * len(self.blocks)

    @property
    def nbytes(self) -> int:
        """Of its own blocks."""
        return sum(block.nbytes for block in self.blocks[-self.own :])

    @property
    def used(self) -> float:
        """Seconds since 1970."""
        return self.blocks[-1].used

    @property
    def root(self) -> str:
        """The digest of its model and settings."""
        return self.blocks[0].parent


def prompts_of(stored: Iterable[StoredBlock]) -> list[StoredPrompt]:
    """All prompts, the one used last first; what two of them begin with counts for the first.

    Blocks without the ones before them, which nothing can use, are as prompts of another root.
    """
    blocks = {block.key: block for block in stored}
    parents = {block.parent for block in blocks.values()}
    leaves = [block for key, block in blocks.items() if key not in parents]
    counted, found = set[str](), list[StoredPrompt]()
    for leaf in sorted(leaves, key=lambda block: block.used, reverse=True):
        chain = {leaf.key: leaf}
        at = leaf
        while (before := blocks.get(at.parent)) and before.key not in chain:
            chain[before.key] = at = before  # a circle of names is somebody's mischief
        own = [key for key in chain if key not in counted]
        counted |= set(own)
        found.append(StoredPrompt(tuple(reversed(chain.values())), len(own)))
    return found


def stored_prompts(folder: Path) -> list[StoredPrompt]:
    """Of a prefix store's folder. Raises OSError."""
    return prompts_of(_blocks(folder)) if folder.is_dir() else []


def _blocks(folder: Path) -> Iterator[StoredBlock]:
    with os.scandir(folder) as entries:
        for entry in entries:
            parent, _, key = entry.name.removesuffix(BLOCK_SUFFIX).partition("-")
            if not entry.name.endswith(BLOCK_SUFFIX) or not key:
                continue
            with suppress(FileNotFoundError):  # another process removes it
                status = entry.stat()
                yield StoredBlock(parent, key, entry.path, status.st_size, status.st_mtime)


_ALL = "prefixes/"


def folder_of(owner: str) -> str:
    """Where an owner's blocks lie, each as PARENT/KEY.kvblock."""
    return f"{_ALL}{owner}/"


def stored_blocks(objects: ObjectStore, owner: str | None = None) -> Iterator[StoredBlock]:
    """Of all owners, unless one is named. used: when it was written; a store does not tell when it
    was read. Raises StoreError."""
    for stored in objects.list_objects(_ALL if owner is None else folder_of(owner)):
        *_, parent, name = stored.key.split("/")
        if name.endswith(BLOCK_SUFFIX):
            key = name.removesuffix(BLOCK_SUFFIX)
            yield StoredBlock(parent, key, stored.key, stored.size, stored.modified)


def make_room(objects: ObjectStore, max_bytes: int) -> tuple[int, int]:
    """Removes blocks of all owners' prompts down to a size; the bytes freed, and those left.

    The prompt whose end was written first goes first, from its end: what is left of a prompt can
    be used. Whoever would read one that goes evaluates it anew. Raises StoreError.
    """
    stored = list(stored_blocks(objects))
    total, freed = sum(block.nbytes for block in stored), 0
    for block in _going(stored):
        if total - freed <= max_bytes:
            break
        objects.delete(block.where)
        freed += block.nbytes
    return freed, total - freed


def _going(stored: Sequence[StoredBlock]) -> Iterator[StoredBlock]:
    """All, in order. Those that are of no prompt, which only mischief makes, are the first."""
    prompts = prompts_of(stored)
    of_prompts = {block.where for prompt in prompts for block in prompt.blocks}
    yield from (block for block in stored if block.where not in of_prompts)
    for prompt in reversed(prompts):
        yield from reversed(prompt.blocks[-prompt.own :])
