"""Sessions by name: one snapshot file each, in one folder."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.storage.files.atomic import atomic_writer, fsync_folder, sweep_temporaries

SNAPSHOT_SUFFIX = ".kvkeep"
_LOCK = ".lock"


class SessionFolder:
    """The sessions kept in a folder. The files are all there is: no index that could be wrong.

    Whoever will save a session holds its lock from before reading it until after saving it;
    reading alone needs none, since files are only ever replaced as a whole.

    older: another folder in which sessions were kept. They are found there too, as long as none of
    the same name is here, and move here when one is locked.
    """

    def __init__(self, path: str | Path, older: str | Path | None = None):
        self._folder = Path(path)
        self._older = SessionFolder(older) if older is not None else None

    @property
    def place(self) -> Path:
        return self._folder

    def path(self, name: str) -> Path:
        """The file for a session of that name, whether it exists or not.

        Raises InvalidArgument for a name that is not one.
        """
        return self._folder / f"{checked_name(name)}{SNAPSHOT_SUFFIX}"

    def existing(self, name: str) -> Path:
        """The file of a session; raises InvalidArgument, naming those there are, if it has none."""
        path = self.path(name)
        if not path.is_file() and self._older is not None:
            path = self._older.path(name)
        if not path.is_file():
            known = ", ".join(self.names()) or "none yet"
            raise InvalidArgument(f"there is no session {name!r}; expected one of: {known}")
        return path

    def names(self) -> list[str]:
        """All sessions, in the order of the alphabet."""
        return sorted(path.stem for path in self._every_file())

    def newest(self) -> Iterator[Path]:
        """The files of all sessions, the one saved last first."""
        dated = []
        for path in self._every_file():
            with suppress(FileNotFoundError):
                dated.append((path.stat().st_mtime_ns, path))
        return (path for _, path in sorted(dated, reverse=True))

    @contextmanager
    def lock(self, name: str) -> Iterator[Path]:
        """Keeps other processes from changing a session meanwhile; its file, here.

        Raises Locked at once if another one holds it, StoreError if the folder cannot be used.
        """
        path = self.path(name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._lock_file(name))
            lock.acquire(timeout=0)
        except Timeout:
            raise Locked(
                f"another process is using session {name!r}; end it, or choose another name"
            ) from None
        except OSError as error:
            raise StoreError(
                f"session {name!r} cannot be kept in {self._folder}: {error.strerror or error}"
            ) from error
        try:
            self._bring(name, path)
            yield path
        finally:
            lock.release()

    def remove(self, name: str) -> int:
        """Removes a session; the bytes freed. Raises InvalidArgument if it is not there, Locked."""
        self.existing(name)
        with self.lock(name):
            path = self.existing(name)  # whoever had it before may have removed it
            size = path.stat().st_size
            path.unlink()
            # While it is held: whoever waits for it notices, and makes a new one.
            self._lock_file(name).unlink(missing_ok=True)
        fsync_folder(self._folder)
        return size

    def discard(self, name: str) -> None:
        """Removes a session that the caller has locked, saved or not, and its lock."""
        self.path(name).unlink(missing_ok=True)
        self._lock_file(name).unlink(missing_ok=True)
        fsync_folder(self._folder)

    def sweep(self) -> list[Path]:
        """Removes what killed processes left: half-written files, and locks of no session."""
        removed = self._older.sweep() if self._older is not None else []
        if not self._folder.is_dir():
            return removed
        removed += sweep_temporaries(self._folder)
        for file in self._folder.glob(f".*{_LOCK}"):
            name = file.name[1 : -len(_LOCK)]
            try:
                with self.lock(name) as path:
                    if not path.exists():
                        file.unlink(missing_ok=True)
                        removed.append(file)
            except (Locked, InvalidArgument):
                continue
        return removed

    def _bring(self, name: str, path: Path) -> None:
        """Moves a session here from the older folder: it is always whole in one of them."""
        if self._older is None or path.exists() or not self._older.path(name).is_file():
            return
        with self._older.lock(name) as source:
            if not source.is_file():
                return
            try:
                _move(source, path)
                self._older._lock_file(name).unlink(missing_ok=True)
                fsync_folder(self._folder)
                fsync_folder(source.parent)
            except OSError as error:
                raise StoreError(
                    f"session {name!r} cannot be moved from {source.parent} to {path.parent} "
                    f"({error.strerror or error}), where sessions are kept now; it is where it was"
                ) from error

    def _every_file(self) -> Iterator[Path]:
        own = list(self._files())
        yield from own
        if self._older is not None:
            names = {path.stem for path in own}
            yield from (path for path in self._older._files() if path.stem not in names)

    def _files(self) -> Iterator[Path]:
        for path in self._folder.glob(f"*{SNAPSHOT_SUFFIX}"):
            if is_name(path.stem) and path.is_file():
                yield path

    def _lock_file(self, name: str) -> Path:
        return self._folder / f".{name}{_LOCK}"


def _move(source: Path, target: Path) -> None:
    """Moves a file; on another disk it is whole before the one that it was made from goes."""
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


_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name


def checked_name(name: str) -> str:
    """Raises InvalidArgument for a name that is not one."""
    if not is_name(name):
        raise InvalidArgument(
            "a session's name must be 1 to 100 letters, digits, '.', '_' and '-', beginning "
            f"with no '.' and without '..'; found {name!r}"
        )
    return name
