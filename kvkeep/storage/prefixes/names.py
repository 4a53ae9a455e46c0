"""What the names of a prefix store's files tell, without a look into them: which prompts it holds.

A block's file is named by the key of the block before it and its own: PARENT-KEY.kvblock. The first
block of a prompt follows on the digest of its model.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BLOCK = 256  # tokens
ENDING = ".kvblock"


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
        return BLOCK * len(self.blocks)

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
            parent, _, key = entry.name.removesuffix(ENDING).partition("-")
            if not entry.name.endswith(ENDING) or not key:
                continue
            with suppress(FileNotFoundError):  # another process removes it
                status = entry.stat()
                yield StoredBlock(parent, key, entry.path, status.st_size, status.st_mtime)
