"""Replacing a file so that a crash leaves the old one or the new one, whole."""

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kvkeep.errors import InvalidArgument, StoreError

TEMPORARY = ".kvkeep-writing-"


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends without an exception.

    It is written beside its place, so that renaming it is atomic, and is on disk before the
    rename, as the rename is before this returns. What killed writers left in the folder goes
    first. A link is followed, and a file that is replaced hands on its permissions.

    Raises OSError where `path` is as it was, StoreError where it is new but not surely on disk.
    """
    path = path.resolve()
    replaced = _status(path)
    if replaced is not None and not stat.S_ISREG(replaced.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    sweep_temporaries(path.parent)
    file, temporary = _temporary(path)
    try:
        with file:
            if replaced is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(replaced.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)  # while the lock is held: see `sweep`
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    try:
        fsync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path} was written, but may be the old one again after a power cut: its folder "
            f"could not be put on disk ({error.strerror or error}). Save again"
        ) from error


def write_atomic(path: Path, content: bytes) -> None:
    """The file holds all of `content`, or what it held before: never a part.

    A pipe or a device is written into. Raises as `atomic_writer`.
    """
    if _is_special(path):
        path.write_bytes(content)
        return
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Where a place was asked for: None writes nothing."""
    if path is not None:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(path, f"{text}\n".encode())


def check_writable(path: Path) -> None:
    """Raises InvalidArgument if `write_atomic` could not write there. Changes nothing."""
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; expected a file to write to")
    if _is_special(path):
        return
    try:
        trial, temporary = _temporary(path.resolve())
        temporary.unlink()
        trial.close()
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written ({error.strerror}); expected a file in a folder that exists "
            "and takes new files"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)


def sweep_temporaries(folder: Path) -> list[Path]:
    """Removes what killed writers left in a folder, and says what that was.

    A writer holds a lock on its file, which the system lets go of when it dies: a process number
    would not tell, since it may belong to another by then, or to one in another container.
    """
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if entry.name.startswith(TEMPORARY)]
    return [path for path in found if _removed(path)]


def _removed(path: Path) -> bool:
    """Removes a temporary file, unless it is in use, gone, or not ours to remove."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _temporary(path: Path) -> tuple[BinaryIO, Path]:
    """A new file beside `path`, locked by this process."""
    while True:
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{path.suffix}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return os.fdopen(descriptor, "wb", buffering=1 << 20), temporary
        except BlockingIOError:
            pass  # another process sweeps it away in this moment
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _is_special(path: Path) -> bool:
    """A pipe or a device such as /dev/stderr, which is written into and must not be replaced."""
    return path.exists() and not path.is_file()


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


PARTIAL = ".partial"


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `final` when the block ends without an exception.

    All of it is on disk before it appears under its name, by one rename. Only one process at a
    time may make folders beside each other; what one that was killed left goes by
    `sweep_partial_folders`.

    Raises OSError.
    """
    partial = final.with_name(final.name + PARTIAL)
    partial.mkdir()
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _to_disk(path)
        if final.exists():
            remove_folder(final)
        partial.rename(final)
        fsync_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Gone at once under its name, then for good: never a half-removed folder under its name."""
    doomed = folder.with_name(f"{folder.name}.old{PARTIAL}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def folder_bytes(folder: Path) -> int:
    """What all files below a folder take, and nothing if it is not there. No link is followed."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            found += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return found


def sweep_partial_folders(parent: Path) -> None:
    """Removes what killed processes left half-made or half-removed. Call it when no one makes."""
    for path in parent.glob("*" + PARTIAL):
        shutil.rmtree(path)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
