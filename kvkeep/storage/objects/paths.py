"""Where one file is, or is to be: a path of this machine, or a key in a store."""

import io
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar, cast, overload

from kvkeep.errors import InvalidArgument, NoObject
from kvkeep.storage.objects.address import is_url, open_object_store
from kvkeep.storage.objects.interface import ChunkSource, ObjectInfo, ObjectStore


class FileStatus(Protocol):
    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime(self) -> float: ...


class Source(Protocol):
    """What reading asks of a place; a `pathlib.Path` is one."""

    @property
    def stem(self) -> str: ...
    def exists(self) -> bool: ...
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...
    def stat(self) -> FileStatus:
        """Raises FileNotFoundError."""


class Target(Protocol):
    """What is written to that is no path: whole, or as it was."""

    def write_chunks(self, pieces: ChunkSource) -> None:
        """Raises StoreError."""


@dataclass(frozen=True)
class ObjectStatus:
    """As `os.stat_result` has it. st_mtime: seconds since 1970."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class ObjectPath:
    """An object, there or not."""

    objects: ObjectStore
    key: str

    def __str__(self) -> str:
        return f"{self.objects.url}/{self.key}"

    @property
    def stem(self) -> str:
        return self.key.rpartition("/")[2].rpartition(".")[0]

    def exists(self) -> bool:
        try:
            self.objects.info(self.key)
        except NoObject:
            return False
        return True

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        return opened(self.objects, self.objects.info(self.key))

    def stat(self) -> ObjectStatus:
        return status(self.objects, self.key)

    def write_chunks(self, pieces: ChunkSource) -> None:
        self.objects.put_chunks(self.key, pieces)


P = TypeVar("P")


@overload
def as_path(place: str) -> Path | ObjectPath: ...
@overload
def as_path(place: P) -> P: ...
def as_path(place: object) -> object:
    """A path, or the object that a URL names; what is a place already stays what it is.

    Raises InvalidArgument for a URL that names no object.
    """
    if not isinstance(place, str):
        return place
    if not is_url(place):
        return Path(place)
    store, _, key = place.rpartition("/")
    if not key or store.endswith(":/"):
        raise InvalidArgument(
            f"{place} names a store; expected an object in it, as {place}/a.kvkeep"
        )
    return ObjectPath(open_object_store(store), key)


def opened(objects: ObjectStore, stored: ObjectInfo) -> BinaryIO:
    """An object as it was when it was looked at."""
    return cast(BinaryIO, io.BufferedReader(ObjectFile(objects, stored), 1 << 16))


def status(objects: ObjectStore, key: str) -> ObjectStatus:
    """Raises FileNotFoundError."""
    try:
        found = objects.info(key)
    except NoObject as error:
        raise FileNotFoundError(str(error)) from error
    return ObjectStatus(found.size, found.modified)


_BEGIN = 1 << 18  # bytes of the first range: most headers are shorter, and are all that many read
_PIECE = 8 << 20  # bytes of a range: a request's latency is small beside it
_AHEAD = 3  # ranges on their way


class ObjectFile(io.RawIOBase):
    """Reads the object that was looked at, and no other that takes its place meanwhile.

    Reading on in order is fastest. Raises StoreError and its kinds.
    """

    def __init__(self, objects: ObjectStore, stored: ObjectInfo):
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
