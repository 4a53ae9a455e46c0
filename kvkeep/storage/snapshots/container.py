"""The container format of kvkeep's files: safetensors with a checksum over every byte.

Any safetensors reader can open it. In addition, tensors begin at multiples of 64 bytes (with
another alignment a kernel may take another path, and give another last bit), and the metadata has a
blake3 checksum for each tensor and one for the header. See `docs/snapshot-format.md`.
"""

import json
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.errors import CorruptFile, InvalidArgument, StoreError
from kvkeep.storage.files.atomic import atomic_writer
from kvkeep.storage.files.tensors import (
    ALIGNMENT,
    DTYPE_NAMES,
    TensorEntry,
    contiguous_chunks,
    encode_header,
)
from kvkeep.storage.objects.paths import ReadablePath, WritablePath
from kvkeep.storage.snapshots.header import (
    MAX_HEADER_BYTES,
    NO_CHECKSUM,
    read_file,
    read_header,
    with_checksum,
)

PADDING = "padding."  # name prefix of tensors that only fill up to the alignment
_CHUNK_BYTES = 1 << 22  # bytes read, hashed or fsynced at once
_MIN_MAPPED_BYTES = 1 << 20  # of a tensor that is read into pages of its own
_THREADS = 2  # for hashing and fsync, beside the one that writes
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_HeaderBuilder = Callable[[Mapping[str, str]], bytes]  # from the tensors' checksums


@dataclass(frozen=True)
class Container:
    """The content of a kvkeep file. document: a JSON object."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


def write_container(
    path: Path | WritablePath,
    kind: str,
    format_version: int,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> int:
    """Write a file atomically, and return its size in bytes.

    kind: such as "snapshot". Tensors may have any strides; they are written in chunks, without a
    full copy. Raises StoreError if writing fails, InvalidArgument for a document that is not JSON;
    then the existing file is unchanged.
    """
    cpu_tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    padded_tensors = dict(_with_padding(cpu_tensors))
    build_header = partial(_build_header, kind, format_version, document, padded_tensors)
    if isinstance(path, Path):
        return _write_file(path, padded_tensors, build_header)
    return _upload(path, padded_tensors, build_header)


def _upload(path: WritablePath, tensors: Mapping[str, Tensor], build_header: _HeaderBuilder) -> int:
    """Upload a file, which allows no seek: hash all tensors, then stream header and tensors."""
    with ThreadPoolExecutor(_THREADS) as executor:
        checksums = executor.map(_checksum_of, tensors.values())
        header = build_header(dict(zip(tensors, checksums, strict=True)))
    path.write_chunks(lambda: chain([header], _chunks(tensors.values())))
    return len(header) + sum(tensor.nbytes for tensor in tensors.values())


def _write_file(path: Path, tensors: Mapping[str, Tensor], build_header: _HeaderBuilder) -> int:
    try:
        # Hashing, writing and fsync overlap.
        with atomic_writer(path) as file, ThreadPoolExecutor(_THREADS) as executor:
            checksum_futures = [executor.submit(_checksum_of, t) for t in tensors.values()]
            fsync_futures = list[Future[None]]()
            # The header has its final size, and gets the checksums at the end.
            unsynced_bytes = file.write(build_header(dict.fromkeys(tensors, NO_CHECKSUM)))
            for chunk in _chunks(tensors.values()):
                unsynced_bytes += file.write(chunk)
                if unsynced_bytes >= _CHUNK_BYTES:
                    file.flush()
                    fsync_futures.append(executor.submit(os.fsync, file.fileno()))
                    unsynced_bytes = 0
            size = file.tell()
            file.seek(0)
            checksums = (future.result() for future in checksum_futures)
            file.write(build_header(dict(zip(tensors, checksums, strict=True))))
            for future in fsync_futures:
                future.result()
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path} could not be written ({reason}); an earlier file is unchanged. Free some "
            "space or choose another place"
        ) from error
    return size


def _chunks(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """Yield the bytes of tensors in chunks of at most 4 MiB."""
    for content in chain.from_iterable(map(contiguous_chunks, tensors)):
        for begin in range(0, len(content), _CHUNK_BYTES):
            yield content[begin : begin + _CHUNK_BYTES]


def _checksum_of(tensor: Tensor) -> str:
    hasher = blake3()
    for chunk in contiguous_chunks(tensor):
        hasher.update(chunk)
    return hasher.hexdigest()


def _build_header(
    kind: str,
    format_version: int,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    checksums: Mapping[str, str],
) -> bytes:
    """Return a header with its own checksum. Its size does not depend on the checksums.

    Raises InvalidArgument for a document that is not JSON, and StoreError if the header is larger
    than readers accept.
    """
    try:
        document_json = json.dumps(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"a {kind} holds JSON values only ({error}): make its notes text, numbers, lists and "
            "dicts with text keys"
        ) from error
    metadata = {
        "kvkeep": kind,
        "version": str(format_version),
        "checksum": NO_CHECKSUM,
        "checksums": json.dumps(checksums),
        "document": document_json,
    }
    entries = {
        name: TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    header = encode_header(entries, metadata)
    if len(header) - 8 > MAX_HEADER_BYTES:  # 8: its length
        raise StoreError(
            f"the {kind} cannot be written: its header would have {len(header):,} bytes, and only "
            f"{MAX_HEADER_BYTES:,} can be read; an earlier file is unchanged. Shorten its notes"
        )
    return with_checksum(header, blake3(header).hexdigest())


def _with_padding(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Insert padding tensors for the alignment, as safetensors allows no gaps."""
    for name, tensor in tensors.items():
        yield name, tensor
        if padding_bytes := -tensor.nbytes % ALIGNMENT:
            yield f"{PADDING}{name}", torch.zeros(padding_bytes, dtype=torch.uint8, device="cpu")


def read_container(
    path: ReadablePath, kind: str, max_format: int, names: Collection[str] | None = None
) -> Container:
    """Read a file and verify every byte of it.

    Tensors are copies, not memory mappings: a mapping would show later changes made in place, and
    a truncated file would kill the process (SIGBUS).

    max_format: the newest format to read. names: of the tensors to read and verify; None for all.

    Raises:
        ForeignFile: it is not a kvkeep file of this kind.
        NewerFormat: it was written by a later kvkeep.
        TruncatedFile, CorruptFile: it is not as it was written; the message says where.
        StoreError: it cannot be read.
    """
    return read_file(path, lambda file: read_open_container(file, path, kind, max_format, names))


def read_open_container(
    file: BinaryIO, path: object, kind: str, max_format: int, names: Collection[str] | None = None
) -> Container:
    """Read an open file as `read_container` does. path: for messages."""
    header = read_header(file, path, kind, max_format)
    tensors = {}
    with ThreadPoolExecutor(1) as executor:
        for name, extent in header.extents.items():
            if names is not None and name not in names:
                continue
            content = _allocate(extent.end - extent.begin)
            buffer = memoryview(content.numpy())  # type: ignore[arg-type]
            if _read_into(buffer, file, extent.begin, executor) != header.checksums[name]:
                raise CorruptFile(
                    f"{path} is corrupt: the checksum of tensor {name!r} differs. The file was not "
                    "changed; restore it from a copy, or evaluate the text again"
                )
            if not name.startswith(PADDING):
                tensors[name] = content.view(_DTYPES[extent.dtype]).reshape(extent.shape)
    return Container(header.document, tensors)


def _read_into(buffer: memoryview, file: BinaryIO, begin: int, executor: ThreadPoolExecutor) -> str:
    """Fill a buffer from a file; return its checksum. executor: reads a chunk ahead of hashing."""

    def next_chunk() -> memoryview:
        count = file.readinto(buffer[filled : filled + _CHUNK_BYTES])  # type: ignore[attr-defined]
        return buffer[filled : filled + count]

    hasher, filled = blake3(), 0
    file.seek(begin)
    chunk = next_chunk()
    while chunk:
        filled += len(chunk)
        if filled == len(buffer):  # without a thread for small tensors, of which there are many
            hasher.update(chunk)
            break
        next_future = executor.submit(next_chunk)
        hasher.update(chunk)
        chunk = next_future.result()
    return hasher.hexdigest()


def _allocate(size: int) -> Tensor:
    """Allocate `size` bytes: for each tensor of a file, so that it is freed without the others.

    Large tensors are in huge pages if the system has them. With pages of 4 kB, page faults would
    take longer than reading and verifying a snapshot.
    """
    if size < _MIN_MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
