"""An object store in a folder: one file per object, replaced atomically and fsynced."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from filelock import FileLock

from kvkeep.errors import Conflict, NoObject, StoreError
from kvkeep.storage.files.atomic import (
    TEMPORARY_PREFIX,
    atomic_writer,
    fsync_folder,
    make_folder,
    sweep_temporary_files,
)
from kvkeep.storage.objects.interface import (
    MAX_GET_BYTES,
    ChunkFactory,
    ObjectInfo,
    checked_key,
    checked_prefix,
    is_valid_key,
    too_large_error,
)

_LOCKS_FOLDER = ".locks"
_LOCK_COUNT = 64  # files; conditional puts of different keys rarely share one
_MAX_HASHED_BYTES = 1 << 16  # up to this size an object's ETag is a hash of its content


class FolderObjectStore:
    """A store in a folder whose file system supports locks; several machines may share it.

    obstore's own folder store does not fsync objects, and its puts cannot depend on an ETag.
    """

    def __init__(self, path: Path):
        """The first write creates the folder. Raises StoreError for one that cannot be used."""
        self._root = path.absolute()
        try:
            target = self._root.resolve()
            existing = next(p for p in (target, *target.parents) if p.exists())
            if not existing.is_dir():
                raise NotADirectoryError(f"{existing} is not a folder")
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a zero byte
            raise StoreError(f"{path} cannot be a store: {error}") from error

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(
        self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        path = self._path(key)
        with self._translated_errors(key, "written"), self._lock(key):
            if if_absent and path.exists():
                raise Conflict(f"object {key} already exists")
            if if_match is not None and (not path.is_file() or _etag(path) != if_match):
                raise Conflict(f"object {key} was changed by another process")
            self._write(path, lambda: [content])
            return _etag(path)

    def put_chunks(self, key: str, iter_chunks: ChunkFactory) -> None:
        with self._translated_errors(key, "written"):
            self._write(self._path(key), iter_chunks)

    def get(self, key: str, max_bytes: int = MAX_GET_BYTES) -> tuple[bytes, str]:
        path = self._path(key)
        with self._translated_errors(key, "read"), path.open("rb") as file:
            status, etag = _status_and_etag(file)
            if status.st_size > max_bytes:
                raise too_large_error(key, max_bytes)
            file.seek(0)
            return file.read(), etag

    def get_range(self, info: ObjectInfo, begin: int, end: int) -> memoryview:
        path = self._path(info.key)
        with self._translated_errors(info.key, "read"), path.open("rb") as file:
            if _status_and_etag(file)[1] != info.etag:
                raise Conflict(f"object {info.key} was changed by another process")
            file.seek(begin)
            return memoryview(file.read(end - begin))

    def info(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._translated_errors(key, "read"), path.open("rb") as file:
            status, etag = _status_and_etag(file)
            return ObjectInfo(key, status.st_size, status.st_mtime, etag)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        for folder, names in self._walk(prefix):
            for path in (folder / name for name in names if is_valid_key(name)):
                if os.path.isfile(path):  # no pipe, of which a read would not return
                    with suppress(NoObject):  # removed meanwhile
                        yield self.info(str(path.relative_to(self._root)))

    def sweep_unfinished(self, prefix: str) -> list[str]:
        removed = list[Path]()
        with self._translated_errors(prefix, "swept"):
            for folder, _ in self._walk(prefix):
                with suppress(FileNotFoundError):  # its last object was deleted meanwhile
                    removed += sweep_temporary_files(folder)
        return [str(path.relative_to(self._root)) for path in removed]

    def _walk(self, prefix: str) -> Iterator[tuple[Path, list[str]]]:
        """Yield the folders of objects below a prefix, and the names of the files in each."""
        for folder, subfolders, names in os.walk(self._root / checked_prefix(prefix)):
            subfolders[:] = filter(is_valid_key, subfolders)
            yield Path(folder), names

    def delete(self, key: str) -> None:
        path = self._path(key)
        if not self._root.is_dir():
            return
        with self._translated_errors(key, "deleted"), self._lock(key):
            path.unlink(missing_ok=True)
            folder = path.parent
            with suppress(OSError):  # it holds other objects, or does not exist
                sweep_temporary_files(folder)  # a removed session must leave no text
                folder.rmdir()
            while not folder.is_dir():  # up to the one whose entries have changed
                folder = folder.parent
            with suppress(FileNotFoundError):  # removed by another process at this moment
                fsync_folder(folder)

    def _write(self, path: Path, iter_chunks: ChunkFactory) -> None:
        for attempts_left in (2, 1, 0):
            try:
                make_folder(path.parent)
                with atomic_writer(path) as file:
                    for chunk in iter_chunks():
                        file.write(chunk)
                return
            except FileNotFoundError:  # a delete of its last object removed the folder just now
                if not attempts_left:
                    raise

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the lock file that a key shares with those of the same hash modulo 64."""
        index = blake3(key.encode()).digest()[0] % _LOCK_COUNT
        folder = self._root / _LOCKS_FOLDER
        make_folder(folder)
        with FileLock(folder / f"{index:02}", thread_local=False):
            yield

    @contextmanager
    def _translated_errors(self, key: str, verb: str) -> Iterator[None]:
        """Raise NoObject and StoreError in place of OSError."""
        try:
            yield
        except FileNotFoundError as error:
            raise NoObject(f"there is no object {key} in {self._root}") from error
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"{key} in {self._root} cannot be {verb}: {reason}") from error


def _etag(path: Path) -> str:
    with path.open("rb") as file:
        return _status_and_etag(file)[1]


def _status_and_etag(file: BinaryIO) -> tuple[os.stat_result, str]:
    """Return the status and the ETag of an open file, which no writer changes."""
    status = os.fstat(file.fileno())
    if status.st_size <= _MAX_HASHED_BYTES:
        return status, blake3(file.read()).hexdigest()
    return status, f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


assert not is_valid_key(TEMPORARY_PREFIX)  # `list_objects` must skip files that are being written
