"""The container format of kvkeep's files: safetensors with a checksum over every byte.

Any safetensors reader can open it. In addition, tensors begin at multiples of 64 bytes (on memory
with another alignment a kernel may take another path, and give another last bit), and the metadata
has a blake3 checksum for each tensor and one for the header. `docs/snapshot-format.md` describes
the format for other readers.
"""

import itertools
import json
import math
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
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
from kvkeep.storage.snapshots.header import NO_CHECKSUM, TensorExtent, open_source, read_header

PADDING = "padding."  # name prefix of tensors that only fill up to the alignment
_CHUNK = 1 << 22  # bytes read, hashed or fsynced at once
_THREADS = 2  # for hashing and fsync, beside the one that writes
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    header = _Header(kind, version, document, tensors)
    return _write_file(path, header) if isinstance(path, Path) else _upload(path, header)


def _upload(target: Target, header: "_Header") -> int:
    """Upload to a target without seek: hash all tensors first, then stream header and tensors."""
    with ThreadPoolExecutor(_THREADS) as executor:
        digests = executor.map(_digest_of, header.laid_out.values())
        header.checksums = dict(zip(header.laid_out, digests, strict=True))
    sealed = header.sealed()

    def chunks() -> Iterator[bytes | memoryview]:
        yield sealed
        for tensor in header.laid_out.values():
            yield from dense_chunks(tensor)

    target.write_chunks(chunks)
    return len(sealed) + sum(tensor.nbytes for tensor in header.laid_out.values())


def _write_file(path: Path, header: "_Header") -> int:
    try:
        # Hashing, writing and fsync of what is written overlap.
        with atomic_writer(path) as file, ThreadPoolExecutor(_THREADS) as executor:
            digests = {name: executor.submit(_digest_of, t) for name, t in header.laid_out.items()}
            syncs, unsynced = [], file.write(bytes(header.size))
            for chunk in _chunks(header.laid_out.values()):
                unsynced += file.write(chunk)
                if unsynced >= _CHUNK:
                    file.flush()
                    syncs.append(executor.submit(os.fsync, file.fileno()))
                    unsynced = 0
            header.checksums = {name: digest.result() for name, digest in digests.items()}
            size = file.tell()
            file.seek(0)
            file.write(header.sealed())
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


class _Header:
    """A header to write. Its size does not depend on the checksums, which are set later."""

    def __init__(
        self,
        kind: str,
        version: int,
        document: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ):
        self.kind, self.version, self.document = kind, version, document
        self.laid_out = dict(_padded(tensors))
        self.checksums = dict.fromkeys(self.laid_out, NO_CHECKSUM)
        self.size = len(self._bytes(NO_CHECKSUM))

    def sealed(self) -> bytes:
        """Return the final bytes, with the checksum of the header itself."""
        return self._bytes(blake3(self._bytes(NO_CHECKSUM)).hexdigest())

    def _bytes(self, checksum: str) -> bytes:
        metadata = {
            "kvkeep": self.kind,
            "version": str(self.version),
            "checksum": checksum,
            "checksums": json.dumps(self.checksums),
            "document": json.dumps(self.document),
        }
        entries = {
            name: TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
            for name, tensor in self.laid_out.items()
        }
        return header_bytes(entries, metadata)


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
        header = read_header(file, path, kind, newest)
        entries = header.entries.items()
        wanted = {name: entry for name, entry in entries if only is None or name in only}
        digested = _read_tensors(file, wanted)
    for name, (_, digest) in digested.items():
        if digest != header.checksums[name]:
            raise CorruptFile(
                f"{path} is corrupt: tensor {name!r} is not what was saved. The file was left "
                "as it is; restore it from a copy, or evaluate the text again"
            )
    tensors = {
        name: tensor for name, (tensor, _) in digested.items() if not name.startswith(PADDING)
    }
    return Container(header.document, tensors)


def _read_tensors(
    file: BinaryIO, wanted: Mapping[str, TensorExtent]
) -> dict[str, tuple[Tensor, str]]:
    """Read tensors; return each with the checksum of the bytes that were copied into it."""
    offsets = list(
        itertools.accumulate((_aligned(e.end - e.begin) for e in wanted.values()), initial=0)
    )
    memory = _memory(offsets[-1])
    tensors = {}
    with ThreadPoolExecutor(1) as reader:
        for offset, (name, entry) in zip(offsets, wanted.items(), strict=False):
            buffer = memoryview(memory)[offset : offset + entry.end - entry.begin]
            digest = _read_into(buffer, file, entry.begin, reader)
            tensors[name] = (_tensor(memory, offset, entry), digest)
    return tensors


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
