"""Where a store's file may be written: asked before the work that it is to hold."""

from pathlib import Path

from kvkeep.errors import ForeignFile, InvalidArgument, StoreError
from kvkeep.storage.files.whole import check_writable
from kvkeep.storage.snapshots.header import read_document


def check_store_place(path: Path, kind: str) -> None:
    """Refuses, before any work, a place where a store's file cannot or should not be written.

    kind: of file, "snapshot" or "calibration". Raises InvalidArgument; also where that would
    replace a file that is none.
    """
    check_writable(path)
    if not path.exists():
        return
    if not path.is_file():
        raise InvalidArgument(f"{path} is a device or a pipe; expected a file to write to")
    try:
        if path.stat().st_size:
            read_document(path, kind, newest=1)
    except ForeignFile as error:
        raise InvalidArgument(
            f"{path} exists and is no {kind}, so it was left as it is; give another name, or "
            "remove it first"
        ) from error
    except StoreError:
        pass  # one that is newer or damaged: to be replaced
