"""The safetensors format: writing files, their headers, and the bytes of tensors."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvkeep.storage.files.atomic import atomic_writer

ALIGNMENT = 64  # bytes: kernels read whole cache lines
_COPIED_BYTES, _LEAST_CHUNK_BYTES = 1 << 17, 1 << 12  # see `contiguous_chunks`
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in the header. dtype: its name in the safetensors format."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_tensors(
    path: Path,
    entries: Mapping[str, TensorEntry],
    chunks: Iterable[bytes | memoryview],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file atomically, with one chunk in memory at a time.

    chunks: the bytes of all tensors in the order of `entries`, split anywhere. Raises as
    `atomic_writer`.
    """
    with atomic_writer(path) as out:
        out.write(encode_header(entries, metadata))
        for chunk in chunks:
            out.write(chunk)


def encode_header(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header with its length prefix, padded so that tensors start 64-byte aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        shape = list(entry.shape)
        header[name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [start, end]}
    header_json = json.dumps(header, separators=(",", ":")).encode()
    header_json += b" " * (-(8 + len(header_json)) % ALIGNMENT)  # 8 bytes of length prefix
    return struct.pack("<Q", len(header_json)) + header_json


def contiguous_chunks(tensor: Tensor) -> Iterator[bytes]:
    """Yield a CPU tensor's bytes in order, in contiguous chunks as large as its strides allow.

    A small tensor is copied into one chunk, and one whose chunks would be small: a chunk takes as
    long as copying some kilobytes. Others are not: allocating memory for a copy takes longer than
    copying.
    """
    copied = tensor.nbytes <= _COPIED_BYTES or tensor[0].nbytes < _LEAST_CHUNK_BYTES
    if copied or tensor.is_contiguous():
        if tensor.numel():
            yield tensor_bytes(tensor)
        return
    for part in tensor:
        yield from contiguous_chunks(part)


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a dense CPU tensor as a view of its memory (a buffer, not a copy)."""
    # A tensor of one number may have any stride, but `view(torch.uint8)` needs stride 1.
    flat = tensor.detach().contiguous().reshape(-1).as_strided((tensor.numel(),), (1,))
    return cast(bytes, memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
