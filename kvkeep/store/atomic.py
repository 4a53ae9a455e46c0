"""Replacing a file so that a crash leaves the old one or the new one, whole."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".kvkeep-writing-"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends without an exception.

    It is written beside its place, so that renaming it is atomic, and is on disk before the
    rename, as the rename is before this returns. What killed writers left there goes first.
    """
    folder = path.parent
    _sweep(folder, path.name)
    descriptor, name = tempfile.mkstemp(
        prefix=f"{TEMPORARY}{os.getpid()}-", suffix=f"-{path.name}", dir=folder
    )
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(folder: Path, name: str) -> None:
    """Removes temporary files of processes that are gone."""
    for left in folder.glob(f"{TEMPORARY}*-{name}"):
        owner = left.name.removeprefix(TEMPORARY).split("-", 1)[0]
        if owner.isdigit() and not _runs(int(owner)):
            left.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
