"""Headers of kvkeep's files, read and verified without torch, so that listing sessions is fast.

`container.py` describes the format, writes files, and reads their tensors.
"""

import errno
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from blake3 import blake3

from kvkeep.errors import (
    Conflict,
    CorruptFile,
    ForeignFile,
    InvalidArgument,
    NewerFormat,
    NoObject,
    StoreError,
    TruncatedFile,
)
from kvkeep.storage.files.atomic import check_writable
from kvkeep.storage.objects.paths import ReadablePath, as_path

T = TypeVar("T")
SNAPSHOT_KIND, SNAPSHOT_FORMAT = "snapshot", 9  # kind and newest format of snapshot files
NO_CHECKSUM = "0" * 64  # in place of the header's own checksum while that is computed
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_ATTEMPTS = 5  # to read an object that others keep replacing
_ROUNDED_BEFORE = {"int8": "int8"}  # files of earlier releases say so by their codec alone
_MAGIC, _CHECKSUM = b'{"__metadata__":{"kvkeep":', b'"checksum":"'


def read_document(path: ReadablePath, kind: str, max_format: int) -> dict[str, Any]:
    """Return the document in a file's verified header alone. Raises as `read_container`."""
    return read_file(path, lambda file: read_header(file, path, kind, max_format).document)


def read_file(path: ReadablePath, read: Callable[[BinaryIO], T]) -> T:
    """Open a file, and return what `read` reads from it: all of it is of one version.

    An object that another writer replaces or removes meanwhile is opened anew. Raises StoreError,
    and what `read` raises.
    """
    for _ in range(_ATTEMPTS):
        with _open_for_reading(path) as file:
            try:
                return read(file)
            except (Conflict, NoObject):
                continue
    raise StoreError(
        f"{path} was replaced by another writer during each of {_ATTEMPTS} reads: try again"
    )


@contextmanager
def _open_for_reading(path: ReadablePath) -> Iterator[BinaryIO]:
    """Open a file to read. Raises StoreError in place of OSError, also from the block."""
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


def _opened(path: ReadablePath) -> BinaryIO:
    try:
        return path.open("rb")
    except ValueError as error:  # a path with a zero byte
        raise OSError(errno.EINVAL, str(error)) from error


@dataclass(frozen=True)
class TensorExtent:
    """The type of a tensor in a file, and its byte range."""

    dtype: str  # its name in the safetensors format
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A verified header. checksums, extents: of each tensor."""

    document: dict[str, Any]
    checksums: dict[str, str]
    extents: dict[str, TensorExtent]


def read_header(file: BinaryIO, path: object, kind: str, max_format: int) -> Header:
    """Read and verify a header. path: for messages. Raises as `read_container`."""
    file_size = file.seek(0, 2)
    file.seek(0)
    length_prefix = file.read(8)
    if not file_size:
        raise ForeignFile(f"{path} is not a kvkeep {kind}: it is empty")
    length = struct.unpack("<Q", length_prefix)[0] if len(length_prefix) == 8 else 0
    header_json = file.read(length) if length <= MAX_HEADER_BYTES else b""
    if not header_json or not (header_json.startswith(_MAGIC) or _MAGIC.startswith(header_json)):
        raise ForeignFile(f"{path} is not a kvkeep {kind}: its beginning differs")
    if len(header_json) < length:
        raise TruncatedFile(f"{path} is truncated: it ends within its header")
    checksum = blake3(with_checksum(length_prefix + header_json, NO_CHECKSUM)).hexdigest()
    if with_checksum(length_prefix + header_json, checksum) != length_prefix + header_json:
        raise CorruptFile(f"{path} is corrupt: its header does not match its checksum")
    try:
        entries = json.loads(header_json, object_pairs_hook=_dict_without_duplicates)
        metadata = entries.pop("__metadata__")
        file_kind, file_format = metadata["kvkeep"], int(metadata["version"])
        if file_format < 1:
            raise ValueError(f"unknown format {file_format}")
        if file_kind == kind and file_format <= max_format:
            return _checked_header(path, file_size, 8 + length, metadata, entries)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path} is corrupt: its header is invalid ({error!r})") from error
    if file_kind != kind:
        raise ForeignFile(f"{path} is a kvkeep {file_kind}; expected a {kind}")
    raise NewerFormat(
        f"{path} has format {file_format}; this kvkeep reads up to {max_format}: upgrade kvkeep"
    )


def with_checksum(header: bytes, checksum: str) -> bytes:
    """Replace the checksum in a header that begins with its length."""
    begin = header.find(_CHECKSUM) + len(_CHECKSUM)
    return header[:begin] + checksum.encode() + header[begin + len(checksum) :]


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for two fields of one name."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("duplicate name")
    return result


def _checked_header(
    path: object, file_size: int, data_begin: int, metadata: dict[str, str], entries: dict[str, Any]
) -> Header:
    """Check that tensors fill the file from `data_begin` on, with the sizes of their shapes.

    entries: the type, shape and byte range of each tensor.
    """
    extents, end = dict[str, TensorExtent](), data_begin
    for name, entry in entries.items():
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        previous_end = end
        begin, end = (data_begin + offset for offset in entry["data_offsets"])
        if not all(type(count) is int and count >= 0 for count in (*shape, begin, end)):
            raise ValueError(f"tensor {name!r} has sizes that are not whole numbers")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if (begin, end) != (previous_end, previous_end + nbytes) or end < begin:
            raise ValueError(f"tensor {name!r} has a size or offset that does not match its shape")
        extents[name] = TensorExtent(dtype, shape, begin, end)
    checksums, document = json.loads(metadata["checksums"]), json.loads(metadata["document"])
    if checksums.keys() != extents.keys() or not isinstance(document, dict):
        raise ValueError("checksums and tensors do not match")
    if file_size < end:
        raise TruncatedFile(f"{path} is truncated: {end - file_size} of its bytes are missing")
    if file_size > end:
        raise CorruptFile(f"{path} is corrupt: {file_size - end} bytes too many")
    return Header(document, checksums, extents)


@dataclass(frozen=True)
class SnapshotSummary:
    """The facts of a snapshot file that lists of sessions show."""

    model: str
    policy: str
    max_kv_size: int
    tokens: int  # of its history, including forgotten ones
    cells: int  # in memory
    notes: dict[str, Any]  # of the application
    rounded: str = ""  # the codec that rounded its cells


def read_summary(path: str | ReadablePath) -> SnapshotSummary:
    """Summarise a snapshot file from its header alone. Raises as `Snapshot.load`."""
    document = read_document(as_path(path), SNAPSHOT_KIND, SNAPSHOT_FORMAT)
    try:
        segments, policy = document["segments"], document["policy"]
        summary = SnapshotSummary(
            document["model"],
            policy["name"],
            policy["max_kv_size"],
            document["tokens"],
            sum(entry["length"] for entry in segments if not entry.get("local", False)),
            document.get("notes", {}),
            rounded_by(document),
        )
        types = [type(value) for value in vars(summary).values()]
        if types != [str, str, int, int, int, dict, str]:
            raise TypeError(summary)
    except (LookupError, TypeError, AttributeError) as error:
        raise CorruptFile(
            f"{path} is corrupt: its session fields are invalid ({error!r:.200})"
        ) from error
    return summary


def rounded_by(document: Mapping[str, Any]) -> str:
    """Return the codec that rounded the cells of a snapshot file, or ""."""
    rounded: str = document.get("rounded", _ROUNDED_BEFORE.get(document["codec"], ""))
    return rounded


def check_output_path(path: Path, kind: str) -> None:
    """Check, before work is done, that a kvkeep file can be written to a path.

    kind: "snapshot" or "calibration". Raises InvalidArgument if not, or if writing would replace a
    file of another kind.
    """
    check_writable(path)
    if not path.exists():
        return
    if not path.is_file():
        raise InvalidArgument(f"{path} is a device or a pipe; expected a file to write to")
    try:
        if path.stat().st_size:
            read_document(path, kind, max_format=1)  # newer formats raise NewerFormat
    except ForeignFile as error:
        raise InvalidArgument(
            f"{path} exists and is not a {kind}; it was not changed. Use another name, or remove "
            "it first"
        ) from error
    except StoreError:
        pass  # a file of the kind may be replaced, even a newer or damaged one
