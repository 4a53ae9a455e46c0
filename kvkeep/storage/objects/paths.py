"""Files to read or write: a path of this machine, or an object in a store."""

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Literal,
    Protocol,
    TypeVar,
    cast,
    overload,
    runtime_checkable,
)

from kvkeep.errors import InvalidArgument, NoObject
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.objects.interface import ChunkFactory, ObjectInfo, ObjectStore

_FIRST_RANGE_BYTES = 1 << 18
_RANGE_BYTES = 8 << 20  # the latency of a request is small against the transfer
_PARALLEL_RANGES = 3


class ReadablePath(Protocol):
    """The path of a file to read. A `pathlib.Path` is one."""

    @property
    def stem(self) -> str: ...
    def exists(self) -> bool: ...
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...
    def stat(self) -> os.stat_result | ObjectInfo:
        """Raises FileNotFoundError."""


class WritablePath(Protocol):
    """The path of a file outside the local file system, which can be replaced."""

    def write_chunks(self, iter_chunks: ChunkFactory) -> None:
        """Replace the file atomically. iter_chunks: called once per attempt. Raises StoreError."""


@runtime_checkable
class StoredPath(Protocol):
    """The path of a file in an object store."""

    @property
    def store(self) -> ObjectStore: ...


@dataclass(frozen=True)
class ObjectPath:
    """The path of an object that may not exist: a `ReadablePath` and a `WritablePath`."""

    store: ObjectStore
    key: str

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}"

    @property
    def stem(self) -> str:
        return self.key.rpartition("/")[2].rpartition(".")[0]

    def exists(self) -> bool:
        try:
            self.store.info(self.key)
        except NoObject:
            return False
        return True

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        return open_object(self.store, self.store.info(self.key))

    def stat(self) -> ObjectInfo:
        try:
            return self.store.info(self.key)
        except NoObject as error:
            raise FileNotFoundError(str(error)) from error

    def write_chunks(self, iter_chunks: ChunkFactory) -> None:
        self.store.put_chunks(self.key, iter_chunks)


PathT = TypeVar("PathT")


@overload
def as_path(path: str) -> Path | ObjectPath: ...
@overload
def as_path(path: PathT) -> PathT: ...
def as_path(path: object) -> object:
    """Convert a string to a path, or to an object if it is a URL. Returns other types unchanged.

    Raises InvalidArgument for the URL of a store.
    """
    if not isinstance(path, str):
        return path
    if not is_url(path):
        return Path(path)
    store_url, _, key = path.rpartition("/")
    if not key or store_url.endswith(":/"):
        raise InvalidArgument(f"{path} is a store; expected an object in it, as {path}/a.kvkeep")
    return ObjectPath(open_object_store(store_url), key)


def open_object(store: ObjectStore, info: ObjectInfo) -> BinaryIO:
    """Open an object in the version of `info`."""
    return cast(BinaryIO, io.BufferedReader(ObjectFile(store, info), 1 << 16))


class ObjectFile(io.RawIOBase):
    """A seekable file over an object, read by range requests with prefetch.

    Range 0 has 256 KiB, as many readers need only the header; each later one has 8 MiB. Reading
    raises Conflict once another version than that of `info` is stored, and StoreError.
    """

    def __init__(self, store: ObjectStore, info: ObjectInfo):
        self._store, self._info = store, info
        self._position = 0
        self._downloads: dict[int, Future[memoryview]] = {}  # by the index of the range
        self._executor = ThreadPoolExecutor(_PARALLEL_RANGES, "kvkeep-read")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._info.st_size)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._info.st_size - self._position)
        if count <= 0:
            return 0
        index = max(0, (self._position - _FIRST_RANGE_BYTES) // _RANGE_BYTES + 1)
        content = self._range_content(index)[self._position - _range_begin(index) :][:count]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._executor.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _range_content(self, index: int) -> memoryview:
        """Return a range's content; after range 0, which stays cached, prefetch the next ones."""
        needed = range(index, index + _PARALLEL_RANGES) if index else range(1)
        for stale in self._downloads.keys() - {0, *needed}:
            self._downloads.pop(stale).cancel()
        for i in needed:
            if i not in self._downloads and _range_begin(i) < self._info.st_size:
                self._downloads[i] = self._executor.submit(self._download_range, i)
        return self._downloads[index].result()

    def _download_range(self, index: int) -> memoryview:
        end = min(_range_begin(index + 1), self._info.st_size)
        return self._store.get_range(self._info, _range_begin(index), end)


def _range_begin(index: int) -> int:
    return _FIRST_RANGE_BYTES + (index - 1) * _RANGE_BYTES if index else 0
