"""The quota of a prefix store: which files are evicted for new ones."""

from collections.abc import Collection, Iterable
from pathlib import Path

from kvkeep.storage.prefixes.inventory import CHECKPOINT_SUFFIX

DEFAULT_MAX_BYTES = 2_000_000_000  # of a store


class Quota:
    """A quota of bytes with LRU eviction. For use under the lock.

    files: (time of last use, bytes, path) of all blocks. pinned: paths that must not be evicted.
    free_bytes: remaining; negative if the quota is exceeded.
    """

    def __init__(
        self, files: Iterable[tuple[int, int, Path]], max_bytes: int, pinned: Collection[Path] = ()
    ):
        oldest_first = sorted(files)
        self.free_bytes = max_bytes - sum(size for _, size, _ in oldest_first)
        self._evictable = {path: size for _, size, path in oldest_first if path not in pinned}

    def make_room(self, size: int) -> bool:
        """Evict blocks until `size` more bytes fit. Returns False at once if they cannot fit."""
        if size > self.free_bytes + sum(self._evictable.values()):
            return False
        while self.free_bytes < size:
            self.remove(next(iter(self._evictable)))
        return True

    def pin(self, path: Path) -> None:
        """Protect a file from eviction."""
        self._evictable.pop(path, None)

    def remove(self, path: Path) -> None:
        """Delete a file, if it exists, and count its bytes as free. With cells its checkpoint."""
        checkpoint = path.with_suffix(CHECKPOINT_SUFFIX)  # of no use without the cells
        for file in {path, checkpoint}:
            file.unlink(missing_ok=True)
            self.free_bytes += self._evictable.pop(file, 0)
