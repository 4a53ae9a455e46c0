"""The files of blocks and checkpoints in the folder of a prefix store: their names and last use."""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvkeep.storage.prefixes.block import PrefixBlock
from kvkeep.storage.prefixes.inventory import BLOCK_SUFFIX, CHECKPOINT_SUFFIX


class BlockFiles:
    """The files of blocks in a folder. Names hold the keys, and modification times the last use."""

    def __init__(self, path: Path):
        self._path = path

    def of_cells(self, block: PrefixBlock) -> Path:
        return self._path / f"{block.parent}-{block.key}{BLOCK_SUFFIX}"

    def of_checkpoint(self, block: PrefixBlock) -> Path:
        return self.of_cells(block).with_suffix(CHECKPOINT_SUFFIX)

    def mark_used(self, blocks: Sequence[PrefixBlock]) -> None:
        """Mark blocks as used now; descendants as slightly older, to be evicted first."""
        now = time.time_ns()
        for age, block in enumerate(blocks):
            with suppress(OSError):  # removed meanwhile, or the store is read-only
                os.utime(self.of_cells(block), ns=(now - age, now - age))

    def mark_checkpoint_used(self, block: PrefixBlock) -> None:
        with suppress(OSError):  # as in `mark_used`
            os.utime(self.of_checkpoint(block))

    def dated(self) -> Iterator[tuple[int, int, Path]]:
        """Yield (time of last use in ns, bytes, path) of each file of a block. Raises OSError."""
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    is_stored = entry.name.endswith((BLOCK_SUFFIX, CHECKPOINT_SUFFIX))
                    if is_stored and entry.is_file():
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, self._path / entry.name

    def newest_children(self, parent: str, count: int) -> list[Path]:
        """Return the files of the last used children of block `parent`. Raises OSError."""
        dated = list[tuple[int, str]]()
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.startswith(f"{parent}-") and entry.name.endswith(BLOCK_SUFFIX):
                    with suppress(FileNotFoundError):  # evicted meanwhile
                        dated.append((entry.stat().st_mtime_ns, entry.name))
        return [self._path / name for _, name in sorted(dated, reverse=True)[:count]]

    def names(self) -> set[str]:
        """Return the names of all files in the folder. Raises OSError."""
        return set(os.listdir(self._path))


def branching_keys(names: Collection[str], keys: Collection[str]) -> set[str]:
    """Return the keys of blocks that have a child which is not among `keys`. names: of files."""
    stems = (name.removesuffix(BLOCK_SUFFIX) for name in names if name.endswith(BLOCK_SUFFIX))
    links = (stem.partition("-") for stem in stems)
    return {parent for parent, _, key in links if key not in keys}
