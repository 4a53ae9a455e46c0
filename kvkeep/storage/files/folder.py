"""Folders that are made whole: each is there with all of its files, or not at all."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.storage.files.whole import fsync_folder

PARTIAL = ".partial"


@contextmanager
def making(final: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `final` when the block ends without an exception.

    All of it is on disk before it appears under its name, by one rename. Only one process at a
    time may make folders beside each other; what one that was killed left goes by
    `sweep_folders`.

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


def sweep_folders(parent: Path) -> None:
    """Removes what killed processes left half-made or half-removed. Call it when no one makes."""
    for path in parent.glob("*" + PARTIAL):
        shutil.rmtree(path)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
