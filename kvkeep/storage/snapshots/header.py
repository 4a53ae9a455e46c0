"""The header of kvkeep's files, read and checked without torch: a list of sessions opens at once.

`container.py` says what such a file is, writes it, and reads its tensors.
"""

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from kvkeep.errors import (
    CorruptFile,
    ForeignFile,
    InvalidArgument,
    NewerFormat,
    StoreError,
    TruncatedFile,
)
from kvkeep.storage.files.atomic import check_writable
from kvkeep.storage.objects.paths import Source, as_path

SNAPSHOT, SNAPSHOT_FORMAT = "snapshot", 6  # the kind of a session's file, and the newest format
NO_CHECKSUM = "0" * 64  # what stands for the header's checksum while it is computed
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_MAGIC, _CHECKSUM = b'{"__metadata__":{"kvkeep":', b'"checksum":"'


def read_document(path: Source, kind: str, newest: int) -> dict[str, Any]:
    """What a file says of itself, from its checked header; tensors are not looked at.

    Raises as `read_container`.
    """
    with opened(path) as file:
        return read_header(file, path, kind, newest).document


@contextmanager
def opened(path: Source) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class TensorExtent:
    """A tensor in a file. dtype: safetensors' name of it. begin, end: its bytes, from the file's
    first on."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A header that was read and checked."""

    document: dict[str, Any]
    checksums: dict[str, str]
    entries: dict[str, TensorExtent]


def read_header(file: BinaryIO, path: Source, kind: str, newest: int) -> Header:
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(8)
    if not size:
        raise ForeignFile(f"{path} is not a kvkeep {kind}: it is empty")
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    text = file.read(length) if length <= MAX_HEADER else b""
    if not text or not (text.startswith(_MAGIC) or _MAGIC.startswith(text)):
        raise ForeignFile(f"{path} is not a kvkeep {kind}: it does not begin like one")
    if len(text) < length:
        raise TruncatedFile(f"{path} is truncated: it ends within its header")
    found = text.find(_CHECKSUM) + len(_CHECKSUM)
    blank = text[:found] + NO_CHECKSUM.encode() + text[found + len(NO_CHECKSUM) :]
    recorded = text[found : found + len(NO_CHECKSUM)]
    if blake3(start + blank).hexdigest().encode() != recorded:
        raise CorruptFile(f"{path} is corrupt: its header is not what was saved")
    try:
        entries = json.loads(text, object_pairs_hook=_each_once)
        metadata = entries.pop("__metadata__")
        holds, version = metadata["kvkeep"], int(metadata["version"])
        if version < 1:
            raise ValueError(f"there is no format {version}")
        if holds == kind and version <= newest:
            return _checked(path, size, 8 + length, metadata, entries)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path} is corrupt: its header makes no sense ({error!r})") from error
    if holds != kind:
        raise ForeignFile(f"{path} is a kvkeep {holds}; expected a {kind}")
    raise NewerFormat(
        f"{path} has format {version}; this kvkeep reads up to {newest}: upgrade kvkeep"
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _checked(
    path: Source, size: int, begin: int, metadata: dict[str, str], entries: dict[str, Any]
) -> Header:
    """That the tensors fill the file from `begin` to its end, each as large as its shape says."""
    found, end = dict[str, TensorExtent](), begin
    for name, entry in entries.items():
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        first, last = (begin + offset for offset in entry["data_offsets"])
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise ValueError(f"tensor {name!r} has sizes that are no whole numbers")
        if (first, last) != (end, end + math.prod(shape) * ITEM_BYTES[dtype]) or last < first:
            raise ValueError(f"tensor {name!r} has another size or place than its shape asks for")
        found[name], end = TensorExtent(dtype, shape, first, last), last
    checksums, document = json.loads(metadata["checksums"]), json.loads(metadata["document"])
    if checksums.keys() != found.keys() or not isinstance(document, dict):
        raise ValueError("checksums and tensors do not match")
    if size < end:
        raise TruncatedFile(f"{path} is truncated: {end - size} of its bytes are missing")
    if size > end:
        raise CorruptFile(f"{path} is corrupt: {size - end} bytes too many")
    return Header(document, checksums, found)


@dataclass(frozen=True)
class SnapshotSummary:
    """tokens: all of them, those forgotten too. cells: that are held. notes: of whoever kept it."""

    model: str
    policy: str
    max_kv_size: int
    tokens: int
    cells: int
    notes: dict[str, Any]


def read_summary(path: str | Source) -> SnapshotSummary:
    """Raises StoreError and its kinds, as `Snapshot.load`; its cells are not looked at."""
    found = read_document(as_path(path), SNAPSHOT, SNAPSHOT_FORMAT)
    try:
        segments = [each for each in found["segments"] if not each.get("local", False)]
        policy = found["policy"]
        says = SnapshotSummary(
            found["model"],
            policy["name"],
            policy["max_kv_size"],
            found["tokens"],
            sum(each["length"] for each in segments),
            found.get("notes", {}),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise _corrupt(path, error) from error
    kinds = (str, str, int, int, int, dict)
    if [type(value) for value in vars(says).values()] != list(kinds):
        raise _corrupt(path, says)
    return says


def _corrupt(path: str | Source, why: object) -> CorruptFile:
    return CorruptFile(f"{path} is corrupt: no session says this of itself ({why!r:.200})")


def check_output_path(path: Path, kind: str) -> None:
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
