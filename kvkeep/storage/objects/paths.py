"""Paths of single files: a path of this machine, or an object in a store."""

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar, cast, overload

from kvkeep.errors import InvalidArgument, NoObject
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.objects.interface import ChunkSource, ObjectInfo, ObjectStore

# The first range of a file is small: most headers are shorter, and many readers need only them.
# For the others the latency of a request is small against the transfer.
_FIRST_RANGE = 1 << 18  # bytes
_RANGE = 8 << 20  # bytes
_PREFETCHED = 3  # ranges


class Source(Protocol):
    """A file to read. A `pathlib.Path` is one."""

    @property
    def stem(self) -> str: ...
    def exists(self) -> bool: ...
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...
    def stat(self) -> os.stat_result | ObjectInfo:
        """Raises FileNotFoundError."""


class Target(Protocol):
    """A place other than a path of this machine to which a file is written atomically."""

    def write_chunks(self, chunks: ChunkSource) -> None:
        """Write the whole file, or leave what is there. Raises StoreError."""


@dataclass(frozen=True)
class ObjectPath:
    """The path of an object, which may or may not exist: a `Source` and a `Target`."""

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
        return open_object(self.objects, self.objects.info(self.key))

    def stat(self) -> ObjectInfo:
        try:
            return self.objects.info(self.key)
        except NoObject as error:
            raise FileNotFoundError(str(error)) from error

    def write_chunks(self, chunks: ChunkSource) -> None:
        self.objects.put_chunks(self.key, chunks)


P = TypeVar("P")


@overload
def as_path(path: str) -> Path | ObjectPath: ...
@overload
def as_path(path: P) -> P: ...
def as_path(path: object) -> object:
    """Convert a string to a path, or to the object that a URL names. Returns other types as is.

    Raises InvalidArgument for a URL that names no object.
    """
    if not isinstance(path, str):
        return path
    if not is_url(path):
        return Path(path)
    store, _, key = path.rpartition("/")
    if not key or store.endswith(":/"):
        raise InvalidArgument(f"{path} names a store; expected an object in it, as {path}/a.kvkeep")
    return ObjectPath(open_object_store(store), key)


def open_object(objects: ObjectStore, stored: ObjectInfo) -> BinaryIO:
    """Open the version of an object that `stored` describes."""
    return cast(BinaryIO, io.BufferedReader(ObjectFile(objects, stored), 1 << 16))


class ObjectFile(io.RawIOBase):
    """A seekable file over an object, read by range requests with prefetch.

    All ranges are of the version that `stored` describes, even if the object is replaced
    meanwhile. Sequential reads are fastest. Raises StoreError and its subclasses.
    """

    def __init__(self, objects: ObjectStore, stored: ObjectInfo):
        self._objects, self._stored = objects, stored
        self._position = 0
        self._ranges: dict[int, Future[memoryview]] = {}  # by their index
        self._executor = ThreadPoolExecutor(_PREFETCHED, "kvkeep-read")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._stored.st_size)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._stored.st_size - self._position)
        if count <= 0:
            return 0
        index = max(0, (self._position - _FIRST_RANGE) // _RANGE + 1)
        content = self._range(index)[self._position - _range_begin(index) :][:count]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._executor.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _range(self, index: int) -> memoryview:
        """Return a range's content, and prefetch the next ones. The first range is kept."""
        upcoming = range(index, index + _PREFETCHED) if index else range(1)
        for other in self._ranges.keys() - {0, *upcoming}:
            self._ranges.pop(other).cancel()
        for needed in upcoming:
            if needed not in self._ranges and _range_begin(needed) < self._stored.st_size:
                self._ranges[needed] = self._executor.submit(self._get, needed)
        return self._ranges[index].result()

    def _get(self, index: int) -> memoryview:
        end = min(_range_begin(index + 1), self._stored.st_size)
        return self._objects.get_range(self._stored, _range_begin(index), end)


def _range_begin(index: int) -> int:
    return _FIRST_RANGE + (index - 1) * _RANGE if index else 0
