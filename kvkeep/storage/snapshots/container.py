"""The container format of kvkeep's files: safetensors with a checksum over every byte.

Any safetensors reader can open it. In addition, tensors begin at multiples of 64 bytes (on memory
with another alignment a kernel may take another path, and give another last bit), and the metadata
has a blake3 checksum for each tensor and one for the header. `docs/snapshot-format.md` describes
the format for other readers.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.errors import CorruptFile, StoreError
from kvkeep.storage.files.atomic import atomic_writer
from kvkeep.storage.files.tensors import (
    ALIGNMENT,
    DTYPE_NAMES,
    TensorEntry,
    dense_chunks,
    header_bytes,
)
from kvkeep.storage.objects.paths import Source, Target
from kvkeep.storage.snapshots.header import (
    NO_CHECKSUM,
    TensorExtent,
    open_source,
    read_header,
    with_checksum,
)

PADDING = "padding."  # name prefix of tensors that only fill up to the alignment
_CHUNK = 1 << 22  # bytes read, hashed or fsynced at once
_THREADS = 2  # for hashing and fsync, beside the one that writes
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_HeaderOf = Callable[[Mapping[str, str]], bytes]  # makes the header with the tensors' checksums


@dataclass(frozen=True)
class Container:
    """The content of a file. document: the JSON values that were given to `write_container`."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


def write_container(
    path: Path | Target,
    kind: str,
    version: int,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> int:
    """Write a file atomically, and return its size in bytes.

    Tensors may be views with any strides; they are written in chunks, without a full copy. Raises
    StoreError if writing fails; then the existing file is unchanged.
    """
    laid_out = dict(_padded({name: tensor.detach().cpu() for name, tensor in tensors.items()}))
    header = partial(_sealed_header, kind, version, document, laid_out)
    if isinstance(path, Path):
        return _write_file(path, laid_out, header)
    return _upload(path, laid_out, header)


def _upload(target: Target, tensors: Mapping[str, Tensor], header: _HeaderOf) -> int:
    """Upload to a target without seek: hash all tensors first, then stream header and tensors."""
    with ThreadPoolExecutor(_THREADS) as executor:
        digests = executor.map(_digest_of, tensors.values())
        sealed = header(dict(zip(tensors, digests, strict=True)))

    def chunks() -> Iterator[bytes | memoryview]:
        yield sealed
        for tensor in tensors.values():
            yield from dense_chunks(tensor)

    target.write_chunks(chunks)
    return len(sealed) + sum(tensor.nbytes for tensor in tensors.values())


def _write_file(path: Path, tensors: Mapping[str, Tensor], header: _HeaderOf) -> int:
    try:
        # Hashing, writing and fsync of what is written overlap.
        with atomic_writer(path) as file, ThreadPoolExecutor(_THREADS) as executor:
            digests = {name: executor.submit(_digest_of, t) for name, t in tensors.items()}
            syncs = []
            unsynced = file.write(header(dict.fromkeys(tensors, NO_CHECKSUM)))  # of final size
            for chunk in _chunks(tensors.values()):
                unsynced += file.write(chunk)
                if unsynced >= _CHUNK:
                    file.flush()
                    syncs.append(executor.submit(os.fsync, file.fileno()))
                    unsynced = 0
            size = file.tell()
            file.seek(0)
            file.write(header({name: digest.result() for name, digest in digests.items()}))
            for sync in syncs:
                sync.result()
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path} could not be written ({reason}); what was there before is unchanged. "
            "Free some space or choose another place"
        ) from error
    return size


def _chunks(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """Yield the bytes of tensors in order, in chunks of at most `_CHUNK`."""
    for tensor in tensors:
        for dense in dense_chunks(tensor):
            for begin in range(0, len(dense), _CHUNK):
                yield dense[begin : begin + _CHUNK]


def _digest_of(tensor: Tensor) -> str:
    digest = blake3()
    for chunk in dense_chunks(tensor):
        digest.update(chunk)
    return digest.hexdigest()


def _sealed_header(
    kind: str,
    version: int,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    checksums: Mapping[str, str],
) -> bytes:
    """Return a header with its own checksum. Its size does not depend on the checksums."""
    metadata = {
        "kvkeep": kind,
        "version": str(version),
        "checksum": NO_CHECKSUM,
        "checksums": json.dumps(checksums),
        "document": json.dumps(document),
    }
    entries = {
        name: TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    header = header_bytes(entries, metadata)
    return with_checksum(header, blake3(header).hexdigest())


def _padded(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Insert padding tensors for the alignment: the format allows no gaps between tensors."""
    for name, tensor in tensors.items():
        yield name, tensor
        if missing := -tensor.nbytes % ALIGNMENT:
            yield f"{PADDING}{name}", torch.zeros(missing, dtype=torch.uint8, device="cpu")


def read_container(
    path: Source, kind: str, newest: int, only: Collection[str] | None = None
) -> Container:
    """Read a file and verify every byte of it.

    Tensors are copies of the verified bytes, so later changes of the file cannot affect them. A
    memory mapping, even a private one, would show changes made in place, and a truncated file
    would kill the process (SIGBUS).

    only: the names of the tensors to verify and return; the others are not read.

    Raises:
        ForeignFile: it is not a kvkeep file of this kind.
        NewerFormat: it was written by a later kvkeep.
        TruncatedFile, CorruptFile: it is not as it was written; the message says where.
        StoreError: it cannot be read.
    """
    # Header and tensors come from one open file: another one may replace it under its path.
    with open_source(path) as file:
        return read_open_container(file, path, kind, newest, only)


def read_open_container(
    file: BinaryIO, path: Source, kind: str, newest: int, only: Collection[str] | None = None
) -> Container:
    """Read an open file as `read_container` does. path: for messages."""
    header = read_header(file, path, kind, newest)
    extents = {name: e for name, e in header.entries.items() if only is None or name in only}
    offsets = accumulate((_aligned(e.end - e.begin) for e in extents.values()), initial=0)
    memory = _memory(sum(_aligned(e.end - e.begin) for e in extents.values()))
    tensors = {}
    with ThreadPoolExecutor(1) as reader:
        for offset, (name, extent) in zip(offsets, extents.items(), strict=False):
            buffer = memoryview(memory)[offset : offset + extent.end - extent.begin]
            if _read_into(buffer, file, extent.begin, reader) != header.checksums[name]:
                raise CorruptFile(
                    f"{path} is corrupt: tensor {name!r} is not what was saved. The file was left "
                    "as it is; restore it from a copy, or evaluate the text again"
                )
            if not name.startswith(PADDING):
                tensors[name] = _tensor(memory, offset, extent)
    return Container(header.document, tensors)


def _read_into(buffer: memoryview, file: BinaryIO, begin: int, reader: ThreadPoolExecutor) -> str:
    """Fill a buffer from a file; return its checksum. Reading and hashing overlap."""

    def next_chunk() -> memoryview:
        count = file.readinto(buffer[done : done + _CHUNK])  # type: ignore[attr-defined]
        return buffer[done : done + count]

    digest, done = blake3(), 0
    file.seek(begin)
    chunk = next_chunk()
    while chunk:
        done += len(chunk)
        following = reader.submit(next_chunk)
        digest.update(chunk)
        chunk = following.result()
    return digest.hexdigest()


def _tensor(memory: mmap.mmap, offset: int, entry: TensorExtent) -> Tensor:
    count, dtype = math.prod(entry.shape), _DTYPES[entry.dtype]
    if not count:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return flat.reshape(entry.shape)


def _memory(size: int) -> mmap.mmap:
    """Allocate private memory, in huge pages if the system has them.

    A snapshot's cells are tens of megabytes. With pages of 4 kB, the page faults would take longer
    than reading and verifying.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
