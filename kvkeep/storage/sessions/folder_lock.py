"""The lock of a whole folder, which one process holds for all files in it by one open file."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock file for the block, and remove it at the end.

    Raises BlockingIOError at once if another process holds it, OSError if it cannot be created.
    """
    descriptor = _open_locked(path)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)  # while it is locked: see `_open_locked`
        finally:
            os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file. Raises OSError if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # not removed between the open and the lock
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
