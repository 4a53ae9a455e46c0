"""What the names of a prefix store's files tell, without a look into them: which prompts it holds.

A block's file is named by the key of the block before it and its own: PARENT-KEY.kvblock. The first
block of a prompt follows on the digest of its model.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BLOCK = 256  # tokens
ENDING = ".kvblock"


@dataclass(frozen=True)
class StoredPrompt:
    """A beginning on which nothing else in the store follows.

    files: of its blocks, in order. tokens: that they hold. nbytes: of those blocks that no longer
    prompt before it in the list has, too. used: seconds since 1970. root: the digest of its model
    and its settings.
    """

    files: tuple[Path, ...]
    nbytes: int
    used: float
    root: str

    @property
    def tokens(self) -> int:
        return BLOCK * len(self.files)


@dataclass(frozen=True)
class _Block:
    parent: str
    key: str
    path: Path
    nbytes: int
    used: float


def stored_prompts(folder: Path) -> list[StoredPrompt]:
    """All prompts, the one used last first; what two of them begin with counts for the first.

    Blocks without the ones before them, which nothing can use, are no prompts. Raises OSError.
    """
    blocks = {block.key: block for block in _blocks(folder)} if folder.is_dir() else {}
    parents = {block.parent for block in blocks.values()}
    roots = parents - blocks.keys()
    leaves = [block for key, block in blocks.items() if key not in parents]
    counted, found = set[str](), list[StoredPrompt]()
    for leaf in sorted(leaves, key=lambda block: block.used, reverse=True):
        chain = [leaf]
        while chain[-1].parent not in roots:
            chain.append(blocks[chain[-1].parent])
        own = [block for block in chain if block.key not in counted]
        counted |= {block.key for block in own}
        files = tuple(block.path for block in reversed(chain))
        nbytes = sum(block.nbytes for block in own)
        found.append(StoredPrompt(files, nbytes, leaf.used, chain[-1].parent))
    return found


def _blocks(folder: Path) -> Iterator[_Block]:
    with os.scandir(folder) as entries:
        for entry in entries:
            parent, _, key = entry.name.removesuffix(ENDING).partition("-")
            if not entry.name.endswith(ENDING) or not key:
                continue
            with suppress(FileNotFoundError):  # another process removes it
                status = entry.stat()
                yield _Block(parent, key, Path(entry.path), status.st_size, status.st_mtime)
