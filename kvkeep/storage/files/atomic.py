"""Atomic writes of files and folders: a crash leaves the old content or the new, complete."""

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

TEMPORARY_PREFIX = ".kvkeep-writing-"  # of files that are being written
PARTIAL_SUFFIX = ".partial"  # of folders that are being written or removed


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an exception.

    The content is written to a temporary file in the same folder, which is fsynced and renamed;
    then the folder is fsynced. A symbolic link is followed, and permissions stay. Temporary files
    that killed writers left in the folder are removed first.

    Raises:
        OSError: nothing was written; `path` is unchanged.
        StoreError: `path` was replaced, but may not survive a power cut.
    """
    path = _resolved(path)
    mode = None
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    sweep_temporary_files(path.parent)
    file, temp_path = _create_temporary_file(path)
    try:
        with file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temp_path, path)  # while the lock is held: see `sweep_temporary_files`
    except BaseException:
        temp_path.unlink(missing_ok=True)
        raise
    try:
        fsync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path} was written, but may revert after a power failure: its folder could not be "
            f"flushed to disk ({error.strerror or error}). Save again"
        ) from error


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file's content, or write into a pipe or device. Raises as `atomic_writer`."""
    if _is_pipe_or_device(path):
        path.write_bytes(content)
        return
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write a JSON report with `write_atomic`, unless `path` is None."""
    if path is not None:
        report_json = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(path, f"{report_json}\n".encode())


def check_writable(path: Path) -> None:
    """Raise InvalidArgument if `write_atomic` could not write to `path`. Changes nothing."""
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; expected a file to write to")
    if _is_pipe_or_device(path):
        return
    try:
        file, temp_path = _create_temporary_file(_resolved(path))
        temp_path.unlink()
        file.close()
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written ({error.strerror}); expected a file in a writable folder"
        ) from error


def sweep_temporary_files(folder: Path) -> list[Path]:
    """Remove the temporary files that killed writers left in a folder, and return their paths.

    A live writer holds a lock on its temporary file, which the system releases when it dies.
    """
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name.startswith(TEMPORARY_PREFIX)]
    return [path for path in paths if _remove_if_unlocked(path)]


def _remove_if_unlocked(path: Path) -> bool:
    """Remove a temporary file. Returns False if it is locked, gone, or may not be removed."""
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


def _resolved(path: Path) -> Path:
    """Return the file that a path leads to. Raises OSError for any path that leads to none."""
    try:
        return path.resolve()
    except (RuntimeError, ValueError) as error:  # a circle of symbolic links, or a zero byte
        raise OSError(errno.EINVAL, str(error)) from error


def _create_temporary_file(path: Path) -> tuple[BinaryIO, Path]:
    """Create a temporary file beside `path`, locked by this process; return it and its path."""
    while True:
        temp_path = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{path.suffix}")
        descriptor = os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # no sweep removed it between the open and the lock
                return os.fdopen(descriptor, "wb", buffering=1 << 20), temp_path
        except BlockingIOError:
            pass  # another process has locked it in between, to sweep it
        except BaseException:
            os.close(descriptor)
            temp_path.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _is_pipe_or_device(path: Path) -> bool:
    """Whether a path is a pipe or a device such as /dev/stderr, which must not be replaced."""
    return path.exists() and not path.is_file()


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Create a folder to fill that replaces `target` when the block ends without an exception.

    All files are fsynced before the folder is renamed. Only one process at a time may write folders
    in the same parent. `sweep_partial_folders` cleans up after killed processes. Raises OSError.
    """
    partial_folder = target.with_name(target.name + PARTIAL_SUFFIX)
    partial_folder.mkdir()
    try:
        yield partial_folder
        for path in [*partial_folder.rglob("*"), partial_folder]:
            _fsync(path)
        if target.exists():
            remove_folder(target)
        partial_folder.rename(target)
        fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Rename a folder, then delete it, so that a crash leaves no half of it under its name."""
    renamed_folder = folder.with_name(f"{folder.name}.old{PARTIAL_SUFFIX}")
    folder.rename(renamed_folder)
    shutil.rmtree(renamed_folder)


def sweep_partial_folders(parent: Path) -> None:
    """Remove folders that killed processes left half written or half removed.

    No process may be writing a folder in `parent` meanwhile.
    """
    for path in parent.glob("*" + PARTIAL_SUFFIX):
        shutil.rmtree(path)


def folder_size(folder: Path) -> int:
    """Return the total bytes of all files below a folder, without links; 0 if it is missing."""
    total_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            total_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total_bytes


def make_folder(folder: Path) -> None:
    """Create a folder and its parents unless they exist, so that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a folder that may be written to but not read
            fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Fsync a folder, so that renames and removals in it survive a power cut."""
    try:
        _fsync(folder, os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no fsync of folders
            raise


def _fsync(path: Path, open_flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | open_flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
