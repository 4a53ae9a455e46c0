"""The file under a snapshot: a safetensors container, checked in every byte.

Any safetensors reader opens it. Beyond the format itself, kvkeep's files have tensors that begin
at multiples of 64 bytes (a kernel may take another path, and give another last bit, on memory
that is aligned otherwise), and metadata with a blake3 checksum for each tensor and one for the
header. `docs/snapshot-format.md` describes it for other readers.
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
from kvkeep.storage.snapshots.header import NO_CHECKSUM, TensorExtent, opened, read_header

PADDING = "padding."  # begins the names of tensors that only fill up
_PIECE = 1 << 22  # bytes read at once
_BESIDE = 2  # threads, beside the one that writes
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Container:
    """What a file holds. document: JSON values, as they were given to `write_container`."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


def write_container(
    place: Path | Target,
    kind: str,
    version: int,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> int:
    """Writes a file, or leaves the one that is there as it is. Returns its size in bytes.

    Tensors may be views with any strides; they are written piece by piece, without a copy of the
    whole. Raises StoreError where the disk or its permissions do not allow it.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    header = _Header(kind, version, document, tensors)
    return _write_file(place, header) if isinstance(place, Path) else _send(place, header)


def _send(target: Target, header: "_Header") -> int:
    """Where nothing can be gone back to: all is hashed first, and then goes by in order."""
    with ThreadPoolExecutor(_BESIDE) as hashing:
        digests = hashing.map(_digest_of, header.laid_out.values())
        header.checksums = dict(zip(header.laid_out, digests, strict=True))
    sealed = header.sealed()

    def pieces() -> Iterator[bytes | memoryview]:
        yield sealed
        for tensor in header.laid_out.values():
            yield from dense_chunks(tensor)

    target.write_chunks(pieces)
    return len(sealed) + sum(tensor.nbytes for tensor in header.laid_out.values())


def _write_file(path: Path, header: "_Header") -> int:
    try:
        # Hashing, writing, and bringing to disk what is written go side by side.
        with atomic_writer(path) as file, ThreadPoolExecutor(_BESIDE) as beside:
            digests = {name: beside.submit(_digest_of, t) for name, t in header.laid_out.items()}
            on_disk, waiting = [], file.write(bytes(header.size))
            for piece in _parts(header.laid_out.values()):
                waiting += file.write(piece)
                if waiting >= _PIECE:
                    file.flush()
                    on_disk.append(beside.submit(os.fsync, file.fileno()))
                    waiting = 0
            header.checksums = {name: digest.result() for name, digest in digests.items()}
            size = file.tell()
            file.seek(0)
            file.write(header.sealed())
            for each in on_disk:
                each.result()
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path} could not be written ({reason}); what was there before is unchanged. "
            "Free some space or choose another place"
        ) from error
    return size


def _parts(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """The bytes of tensors in order, in pieces of at most `_PIECE`."""
    for tensor in tensors:
        for piece in dense_chunks(tensor):
            for begin in range(0, len(piece), _PIECE):
                yield piece[begin : begin + _PIECE]


def _digest_of(tensor: Tensor) -> str:
    digest = blake3()
    for piece in dense_chunks(tensor):
        digest.update(piece)
    return digest.hexdigest()


class _Header:
    """The header's bytes: of one size before and after the checksums are known."""

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
        """The final bytes, with the checksum of the header itself."""
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
    """The format allows no holes, so what fills up to the alignment is a tensor, too."""
    for name, tensor in tensors.items():
        yield name, tensor
        if missing := -tensor.nbytes % ALIGNMENT:
            yield f"{PADDING}{name}", torch.zeros(missing, dtype=torch.uint8, device="cpu")


def read_container(
    path: Source, kind: str, newest: int, only: Collection[str] | None = None
) -> Container:
    """Reads a file and checks every byte of it.

    Tensors are copies of what was checked, and nothing that happens to the file reaches them. A
    mapping, private or not, would follow a writer that changes the file in its place, and end the
    process where one cuts it short.

    only: the tensors to check and to return, where they are; the others are not looked at.

    Raises:
        ForeignFile: not a kvkeep file of this kind. NewerFormat: made by a later kvkeep.
        TruncatedFile, CorruptFile: not as it was written; the latter says where.
        StoreError: it cannot be read at all.
    """
    # One open file for all of it: by the next look at its path it may have been replaced.
    with opened(path) as file:
        header = read_header(file, path, kind, newest)
        entries = header.entries.items()
        wanted = {name: entry for name, entry in entries if only is None or name in only}
        read = _read_tensors(file, wanted)
    for name, (_, digest) in read.items():
        if digest != header.checksums[name]:
            raise CorruptFile(
                f"{path} is corrupt: tensor {name!r} is not what was saved. The file was left "
                "as it is; restore it from a copy, or evaluate the text again"
            )
    tensors = {name: tensor for name, (tensor, _) in read.items() if not name.startswith(PADDING)}
    return Container(header.document, tensors)


def _read_tensors(
    file: BinaryIO, wanted: Mapping[str, TensorExtent]
) -> dict[str, tuple[Tensor, str]]:
    """Tensors, and for each the checksum of just the bytes that it was given."""
    places = list(
        itertools.accumulate((_aligned(e.end - e.begin) for e in wanted.values()), initial=0)
    )
    room = _memory(places[-1])
    found = {}
    with ThreadPoolExecutor(1) as reading:
        for place, (name, entry) in zip(places, wanted.items(), strict=False):
            into = memoryview(room)[place : place + entry.end - entry.begin]
            digest = _read_into(into, file, entry.begin, reading)
            found[name] = (_tensor(room, place, entry), digest)
    return found


def _read_into(into: memoryview, file: BinaryIO, begin: int, reading: ThreadPoolExecutor) -> str:
    """Fills memory from a file. Its checksum: one piece is hashed while the next is read."""

    def next_piece() -> memoryview:
        count = file.readinto(into[done : done + _PIECE])  # type: ignore[attr-defined]
        return into[done : done + count]

    digest, done = blake3(), 0
    file.seek(begin)
    piece = next_piece()
    while piece:
        done += len(piece)
        following = reading.submit(next_piece)
        digest.update(piece)
        piece = following.result()
    return digest.hexdigest()


def _tensor(room: mmap.mmap, place: int, entry: TensorExtent) -> Tensor:
    count, dtype = math.prod(entry.shape), _DTYPES[entry.dtype]
    if not count:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(room, dtype=dtype, count=count, offset=place)
    return flat.reshape(entry.shape)


def _memory(size: int) -> mmap.mmap:
    """Memory of this process alone, in large pages where the system has them.

    A snapshot's cells are tens of megabytes: in pages of 4 kB, to get them from the system takes
    longer than to read and check them.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
