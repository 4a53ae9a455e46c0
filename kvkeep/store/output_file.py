"""Files that a command writes at its end: refused before its start, and never half-written."""

import json
import os
from pathlib import Path
from typing import Any

from kvkeep.errors import ForeignFile, InvalidArgument, StoreError
from kvkeep.store.atomic import replacing


def check_writable(path: Path) -> None:
    """Raises InvalidArgument if `write_whole` could not write there. Changes nothing."""
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; expected a file to write to")
    if _is_special(path):
        return
    try:
        trial = _beside(path)
        os.close(os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        trial.unlink()
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written ({error.strerror}); expected a file in a folder that exists "
            "and takes new files"
        ) from error


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
    from kvkeep.store.container import read_document

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


def write_whole(path: Path, content: bytes) -> None:
    """The file holds all of `content`, or what it held before: never a part."""
    if _is_special(path):
        path.write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Where a place was asked for: None writes nothing."""
    if path is not None:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{text}\n".encode())


def _is_special(path: Path) -> bool:
    """A pipe or a device such as /dev/stderr, which is written into and must not be replaced."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    final = path.resolve()
    return final.with_name(f".{final.name}.{os.getpid()}.tmp")
