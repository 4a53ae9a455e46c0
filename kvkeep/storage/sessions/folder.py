"""Sessions by name in a folder: a snapshot file each, and locks of one or of all of them."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.storage.files.atomic import (
    atomic_writer,
    fsync_folder,
    make_folder,
    sweep_temporary_files,
)
from kvkeep.storage.sessions.folder_lock import exclusive_lock, is_locked
from kvkeep.storage.sessions.interface import (
    SNAPSHOT_SUFFIX,
    LabelStore,
    SessionStore,
    checked_name,
    is_valid_name,
    require_distinct,
)

_LOCK_SUFFIX = ".lock"
_FOLDER_LOCK = ".folder-lock"


class SessionFolder(SessionStore[Path]):
    """The sessions in a folder. There is no index that could be wrong, only the files.

    A process that will save a session holds its lock, or that of the folder, from before it reads
    the session until it has saved it. Reading needs no lock, since files are replaced atomically.
    `lock` takes the session's lock and then looks for the folder's; `lock_all` takes the folder's
    and then looks for those of sessions. So of two processes one at least is refused.

    legacy_root: a folder in which sessions were kept before. Its sessions are listed too, unless
    one here has the same name, and are moved here when they are locked.
    """

    def __init__(self, root: str | Path, legacy_root: str | Path | None = None):
        self.root = Path(root)
        self._legacy = None if legacy_root is None else SessionFolder(legacy_root)

    # Reading

    def path(self, name: str) -> Path:
        return self.root / f"{checked_name(name)}{SNAPSHOT_SUFFIX}"

    def existing_path(self, name: str) -> Path:
        for sessions in (self, self._legacy):
            if sessions is not None and (path := sessions.path(name)).is_file():
                return path
        raise self.unknown_name_error(name)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._all_files())

    def newest_first(self) -> Iterator[Path]:
        dated_paths = []
        for path in self._all_files():
            with suppress(FileNotFoundError):  # removed meanwhile
                dated_paths.append((path.stat().st_mtime_ns, path))
        return (path for _, path in sorted(dated_paths, reverse=True))

    def _all_files(self) -> Iterable[Path]:
        """Return the files here, and those in the legacy folder with other names."""
        files = {} if self._legacy is None else {f.stem: f for f in self._legacy._all_files()}
        for path in self.root.glob(f"*{SNAPSHOT_SUFFIX}"):
            if is_valid_name(path.stem) and path.is_file():
                files[path.stem] = path
        return files.values()

    # Writing

    @contextmanager
    def lock(self, name: str) -> Iterator[Path]:
        """Hold a session's lock for the block, and yield its file in this folder.

        Raises Locked at once if another process holds its lock or the folder's, StoreError for an
        unusable folder, InvalidArgument for a new name that differs from another only in case.
        """
        path = self.path(name)
        require_distinct(name, self.names())
        with self._locked(name):
            self._move_from_legacy(name, path)
            yield path

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a name, new or not, for the block."""
        try:
            self._require_no_folder_lock()  # before a lock file is created
            make_folder(self.root)
            lock = FileLock(self._lock_file(name)).acquire(timeout=0)
        except Timeout:
            raise Locked(
                f"session {name!r} is in use by another process; stop it, or use another name"
            ) from None
        except OSError as error:
            raise StoreError(
                f"session {name!r} cannot be stored in {self.root}: {error.strerror or error}"
            ) from error
        with lock:
            self._require_no_folder_lock()
            yield

    @contextmanager
    def lock_all(self) -> Iterator[None]:
        """Hold the lock of all sessions here for the block, by one open file. Raises as `lock`."""
        with ExitStack() as lock:
            try:
                make_folder(self.root)
                lock.enter_context(exclusive_lock(self.root / _FOLDER_LOCK))
                if any(map(is_locked, self._lock_files())):
                    raise _folder_locked_error()
            except BlockingIOError:
                raise _folder_locked_error() from None
            except OSError as error:
                raise StoreError(
                    f"sessions cannot be stored in {self.root}: {error.strerror or error}"
                ) from error
            yield

    def remove(self, name: str) -> int:
        self.existing_path(name)
        with self.lock(name):
            size = self.existing_path(name).stat().st_size  # the last holder may have removed it
            if self._legacy is not None and self._legacy.path(name).is_file():
                self._legacy.remove(name)  # an older one of this name, which would be found again
            self.discard(name)
        return size

    def discard(self, name: str) -> None:
        """Remove a session that the caller has locked, its lock file, and what killed writers left.

        A process that waits for the lock file notices, and creates a new one.
        """
        self.path(name).unlink(missing_ok=True)
        sweep_temporary_files(self.root)
        self._lock_file(name).unlink(missing_ok=True)
        fsync_folder(self.root)

    def sweep(self) -> list[Path]:
        """Remove temporary files of killed processes, and lock files without a session."""
        removed = self._legacy.sweep() if self._legacy is not None else []
        if not self.root.is_dir():
            return removed
        removed += sweep_temporary_files(self.root)
        for file in self._lock_files():
            name = file.name.removeprefix(".").removesuffix(_LOCK_SUFFIX)
            try:
                path = self.path(name)
                with self._locked(name):
                    if not path.exists():
                        file.unlink(missing_ok=True)
                        removed.append(file)
            except (Locked, InvalidArgument):  # in use, or no session's lock file
                continue
        return removed

    def _move_from_legacy(self, name: str, path: Path) -> None:
        """Move a session here from the legacy folder, if it is only there.

        At any time it is complete in one of the folders.
        """
        if self._legacy is None or path.exists() or not self._legacy.path(name).is_file():
            return
        with self._legacy.lock(name) as source:
            if not source.is_file():
                return
            try:
                _move(source, path)
                self._legacy._lock_file(name).unlink(missing_ok=True)
                fsync_folder(self.root)
                fsync_folder(source.parent)
            except OSError as error:
                raise StoreError(
                    f"session {name!r} could not be moved from {source.parent} to its new folder "
                    f"{path.parent} ({error.strerror or error}); it is unchanged"
                ) from error

    def _lock_file(self, name: str) -> Path:
        return self.root / f".{name}{_LOCK_SUFFIX}"

    def _lock_files(self) -> Iterator[Path]:
        return self.root.glob(f".*{_LOCK_SUFFIX}")

    def _require_no_folder_lock(self) -> None:
        if is_locked(self.root / _FOLDER_LOCK):
            raise _folder_locked_error()


def _folder_locked_error() -> Locked:
    return Locked(
        "another process, such as a server, uses the sessions in this folder; stop it, or use "
        "another folder"
    )


class LabelFolder(LabelStore[Path], SessionFolder):
    """The labelled snapshots in a folder."""


def _move(source: Path, target: Path) -> None:
    """Move a file. To another file system, copy it atomically before removing the source."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        status = source.stat()
        with source.open("rb") as original, atomic_writer(target) as file:
            shutil.copyfileobj(original, file, 1 << 20)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        source.unlink()
