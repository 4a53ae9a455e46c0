"""An object as a file to read: by ranges, some of them on their way before they are asked for."""

import io
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvkeep.storage.objects.interface import Objects, Stored

_BEGIN = 1 << 18  # bytes of the first range: most headers are shorter, and are all that many read
_PIECE = 8 << 20  # bytes of a range: a request's latency is small beside it
_AHEAD = 3  # ranges on their way


class ObjectFile(io.RawIOBase):
    """Reads the object that was looked at, and no other that takes its place meanwhile.

    Reading on in order is fastest. Raises StoreError and its kinds.
    """

    def __init__(self, objects: Objects, stored: Stored):
        self._objects, self._stored = objects, stored
        self._at = 0
        self._coming: deque[tuple[int, Future[memoryview]]] = deque()
        self._reader = ThreadPoolExecutor(_AHEAD, "kvkeep-read")
        self._first: memoryview | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._at, self._stored.size)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        wanted = min(len(into), self._stored.size - self._at)
        if wanted <= 0:
            return 0
        begin, piece = self._piece()
        found = piece[self._at - begin :][:wanted]
        into[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._reader.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _piece(self) -> tuple[int, memoryview]:
        """The range that holds the place, and where it begins."""
        wanted = _begin(self._at)
        if not wanted:
            self._first = self._first or self._get(0)  # it is read in several steps
            return 0, self._first
        while self._coming and self._coming[0][0] != wanted:
            self._coming.popleft()[1].cancel()
        last = _end(self._coming[-1][0]) if self._coming else wanted
        while len(self._coming) < _AHEAD and last < self._stored.size:
            self._coming.append((last, self._reader.submit(self._get, last)))
            last = _end(last)
        return wanted, self._coming[0][1].result()

    def _get(self, begin: int) -> memoryview:
        return self._objects.get_range(self._stored, begin, min(_end(begin), self._stored.size))


def _begin(place: int) -> int:
    """Of the range that a place is in."""
    return 0 if place < _BEGIN else _BEGIN + (place - _BEGIN) // _PIECE * _PIECE


def _end(begin: int) -> int:
    """Of the range that begins there."""
    return begin + _PIECE if begin else _BEGIN
