"""Sessions by name: one snapshot file each, in one folder."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.files.whole import fsync_folder, sweep

ENDING = ".kvkeep"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_LOCK = ".lock"


class SessionFolder:
    """The sessions kept in a folder. The files are all there is: no index that could be wrong.

    Whoever will save a session holds its lock from before reading it until after saving it;
    reading alone needs none, since files are only ever replaced as a whole.
    """

    def __init__(self, path: str | Path):
        self._folder = Path(path)

    def path(self, name: str) -> Path:
        """The file for a session of that name, whether it exists or not.

        Raises InvalidArgument for a name that is not one.
        """
        if not _is_name(name):
            raise InvalidArgument(
                "a session's name must be 1 to 100 letters, digits, '.', '_' and '-', beginning "
                f"with no '.' and without '..'; found {name!r}"
            )
        return self._folder / f"{name}{ENDING}"

    def existing(self, name: str) -> Path:
        """The file of a session; raises InvalidArgument, naming those there are, if it has none."""
        path = self.path(name)
        if not path.is_file():
            known = ", ".join(self.names()) or "none yet"
            raise InvalidArgument(f"there is no session {name!r}; expected one of: {known}")
        return path

    def names(self) -> list[str]:
        """All sessions, in the order of the alphabet."""
        return sorted(path.stem for path in self._files())

    def newest(self) -> Iterator[Path]:
        """The files of all sessions, the one saved last first."""
        dated = []
        for path in self._files():
            with suppress(FileNotFoundError):
                dated.append((path.stat().st_mtime_ns, path))
        return (path for _, path in sorted(dated, reverse=True))

    @contextmanager
    def lock(self, name: str) -> Iterator[Path]:
        """Keeps other processes from changing a session meanwhile; its file.

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
            yield path
        finally:
            lock.release()

    def remove(self, name: str) -> int:
        """Removes a session; the bytes freed. Raises InvalidArgument if it is not there, Locked."""
        path = self.existing(name)
        with self.lock(name):
            size = path.stat().st_size
            path.unlink()
            # While it is held: whoever waits for it notices, and makes a new one.
            self._lock_file(name).unlink(missing_ok=True)
        fsync_folder(self._folder)
        return size

    def sweep(self) -> list[Path]:
        """Removes what killed processes left: half-written files, and locks of no session."""
        if not self._folder.is_dir():
            return []
        removed = sweep(self._folder)
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

    def _files(self) -> Iterator[Path]:
        for path in self._folder.glob(f"*{ENDING}"):
            if _is_name(path.stem) and path.is_file():
                yield path

    def _lock_file(self, name: str) -> Path:
        return self._folder / f".{name}{_LOCK}"


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name
