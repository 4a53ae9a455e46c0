"""Objects as files in a folder: each replaced as a whole, and on disk when that is said."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3
from filelock import FileLock

from kvkeep.errors import Conflict, NoObject, StoreError
from kvkeep.storage.files.atomic import TEMPORARY, atomic_writer, fsync_folder
from kvkeep.storage.objects.interface import (
    SMALL,
    ChunkSource,
    ObjectInfo,
    checked_key,
    checked_prefix,
    too_large,
)

_LOCKS = ".locks"
_STRIPES = 64  # conditional puts of different keys rarely wait for each other
_SMALL = 1 << 16  # bytes; a tag of such an object is a hash of it


class FolderObjectStore:
    """A folder of one machine, or one that several share whose file system has locks.

    obstore has one too, whose objects are not put on disk, and which knows no condition by tags.
    """

    def __init__(self, path: Path):
        """Raises StoreError for a folder that cannot be used."""
        self._root = path.absolute()
        try:
            (self._root / _LOCKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot hold a store: {error.strerror or error}") from error

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(
        self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        path = self._path(key)
        with self._failing(key, "written"), self._lock(key):
            if if_absent and path.exists():
                raise Conflict(f"there is an object {key} already")
            if if_match is not None and (not path.is_file() or _tag(path) != if_match):
                raise Conflict(f"the object {key} is another by now")
            self._write(path, lambda: [content])
            return _tag(path)

    def put_chunks(self, key: str, pieces: ChunkSource) -> None:
        with self._failing(key, "written"):
            self._write(self._path(key), pieces)

    def get(self, key: str, most: int = SMALL) -> tuple[bytes, str]:
        path = self._path(key)
        with self._failing(key, "read"):
            if path.stat().st_size > most:
                raise too_large(key, most)
            content = path.read_bytes()
        return content, _tag_of(content) if len(content) <= _SMALL else self.info(key).etag

    def get_range(self, stored: ObjectInfo, begin: int, end: int) -> memoryview:
        path = self._path(stored.key)
        with self._failing(stored.key, "read"), path.open("rb") as file:
            if _tag(path) != stored.etag:
                raise Conflict(f"the object {stored.key} is another by now")
            file.seek(begin)
            return memoryview(file.read(end - begin))

    def info(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._failing(key, "read"):
            status = path.stat()
            return ObjectInfo(key, status.st_size, status.st_mtime, _tag(path))

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        begin = self._root / checked_prefix(prefix)
        for folder, below, names in os.walk(begin):
            below[:] = [name for name in below if not name.startswith(".")]
            for name in names:
                key = str((Path(folder) / name).relative_to(self._root))
                if not name.startswith("."):
                    with suppress(NoObject):  # removed meanwhile
                        yield self.info(key)

    def list_folders(self, prefix: str) -> list[str]:
        place = self._root / checked_prefix(prefix)
        try:
            with os.scandir(place) as entries:
                found = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed(prefix, "read", error) from error
        return sorted(found)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._failing(key, "deleted"), self._lock(key):
            path.unlink(missing_ok=True)
            folder = path.parent
            with suppress(OSError):  # other objects are there, or no folder is
                folder.rmdir()
            while not folder.is_dir():
                folder = folder.parent
            with suppress(FileNotFoundError):  # it went in this moment
                fsync_folder(folder)

    def _write(self, path: Path, pieces: ChunkSource) -> None:
        for again in (True, True, False):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with atomic_writer(path) as file:
                    for piece in pieces():
                        file.write(piece)
                return
            except FileNotFoundError:  # the folder went with its last object in this moment
                if not again:
                    raise

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        stripe = blake3(key.encode()).digest()[0] % _STRIPES
        with FileLock(self._root / _LOCKS / f"{stripe:02}", thread_local=False):
            yield

    @contextmanager
    def _failing(self, key: str, verb: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NoObject(f"there is no object {key} in {self._root}") from error
        except OSError as error:
            raise self._failed(key, verb, error) from error

    def _failed(self, key: str, verb: str, error: OSError) -> StoreError:
        reason = error.strerror or error
        return StoreError(f"{key} in {self._root} cannot be {verb}: {reason}")


def _tag(path: Path) -> str:
    status = path.stat()
    if status.st_size <= _SMALL:
        return _tag_of(path.read_bytes())
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _tag_of(content: bytes) -> str:
    return blake3(content).hexdigest()


assert TEMPORARY.startswith(".")  # half-written files are no objects
