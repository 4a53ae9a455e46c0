"""Files of packed matrices, written once and memory-mapped, and the checksums beside them.

A safetensors file holds a model's tensors by name; a packed one as NAME.codes and NAME.scales, with
its format in the metadata. The checksum lies beside the file, and is verified in memory whenever
the file is mapped.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import BadModelFile, StoreError
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packing import Matrix, PackedMatrix, packed_shapes
from kvkeep.storage.files.atomic import write_atomic
from kvkeep.storage.files.tensors import DTYPE_NAMES, TensorEntry, tensor_bytes, write_tensors

_VERSION = "3"
_FILE_TYPE = "packed weights"


@dataclass(frozen=True)
class NewMatrix:
    """A matrix to write.

    format: a packed format, or the dtype of a plain tensor. chunks: the matrix in that format, some
    rows at a time: whole blocks of 16, except the last.
    """

    format: Format | torch.dtype
    shape: tuple[int, ...]
    chunks: Iterator[Matrix]

    def header_entries(self, name: str) -> dict[str, TensorEntry]:
        """Return the dtypes, shapes and sizes of the file's tensors for the matrix, by name."""
        if isinstance(self.format, torch.dtype):
            nbytes = self.format.itemsize * math.prod(self.shape)
            return {name: TensorEntry(DTYPE_NAMES[self.format], self.shape, nbytes)}
        codes, scales = packed_shapes(self.format, *self.shape)
        return {
            f"{name}.codes": TensorEntry("U8", codes, math.prod(codes)),
            f"{name}.scales": TensorEntry("U8", scales, math.prod(scales)),
        }


def checksum_of(matrices: Mapping[str, Matrix]) -> str:
    """Return the BLAKE3 checksum of each tensor's name and bytes, as `write_packed` does."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, matrix in matrices.items():
        for tensor_name, tensor in _stored_tensors(name, matrix):
            hasher.update(f"{tensor_name}\n".encode())
            hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def _stored_tensors(name: str, matrix: Matrix) -> list[tuple[str, Tensor]]:
    """Return the file's tensors for a matrix, each with its name: two if it is packed."""
    if isinstance(matrix, PackedMatrix):
        return [(f"{name}.codes", matrix.data), (f"{name}.scales", matrix.scales)]
    return [(name, matrix)]


def read_checksum(path: Path) -> str | None:
    """Return the checksum beside a file; None if there is no valid one."""
    try:
        text = _checksum_path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.blake3")


def byte_progress_bar(total: int, description: str, progress: bool) -> "tqdm[NoReturn]":
    """Return a progress bar over bytes; with progress, it is shown on terminals only."""
    return tqdm(
        total=total, desc=description, unit="B", unit_scale=True, disable=None if progress else True
    )


def write_packed(
    path: Path, matrices: Mapping[str, NewMatrix], description: str, progress: bool
) -> str:
    """Write a file atomically, and the checksum beside it; return the checksum.

    description: of the progress bar. The scales of a matrix stay in memory until its codes are
    written.
    """
    entries: dict[str, TensorEntry] = {}
    for name, matrix in matrices.items():
        entries |= matrix.header_entries(name)
    bar = byte_progress_bar(sum(entry.nbytes for entry in entries.values()), description, progress)
    hasher, hashed_names = blake3(max_threads=blake3.AUTO), set[str]()

    def hash_bytes(name: str, tensor: Tensor) -> bytes:
        if name not in hashed_names:
            hashed_names.add(name)
            hasher.update(f"{name}\n".encode())
        tensor_data = tensor_bytes(tensor)
        hasher.update(tensor_data)
        bar.update(len(tensor_data))
        return tensor_data

    def file_chunks() -> Iterator[bytes]:
        for name, matrix in matrices.items():
            scale_tensors = []
            for chunk in matrix.chunks:
                first, *scales = _stored_tensors(name, chunk)  # codes and scales, or a tensor
                scale_tensors += scales
                yield hash_bytes(*first)
            yield from (hash_bytes(*scales) for scales in scale_tensors)

    formats = {n: m.format.name for n, m in matrices.items() if isinstance(m.format, Format)}
    metadata = {"kvkeep": _FILE_TYPE, "version": _VERSION, "formats": json.dumps(formats)}
    _checksum_path(path).unlink(missing_ok=True)  # before the file that it belongs to is replaced
    with bar:
        write_tensors(path, entries, file_chunks(), metadata)
    with contextlib.suppress(OSError, StoreError):  # without a checksum the file is not trusted
        write_atomic(_checksum_path(path), f"{hasher.hexdigest()}\n".encode())
    return hasher.hexdigest()


def read_packed(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """Return a file's matrices, memory-mapped, without verifying the checksum.

    shapes: of all matrices. Raises BadModelFile if the file holds others, or is incomplete.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != _VERSION or metadata.get("kvkeep") != _FILE_TYPE:
                raise BadModelFile(f"{path} was written by another version of kvkeep; remove it")
            formats = json.loads(metadata.get("formats", ""))
            if not isinstance(formats, dict) or not set(formats.values()) <= FORMATS.keys():
                raise ValueError("its formats are unknown")
            names = set(file.keys())
            expected = {f"{name}{end}" for name in shapes for end in ("", ".codes", ".scales")}
            if names - expected:
                raise ValueError(f"it has {min(names - expected)}, which the model does not have")
            return {
                name: _read_matrix(file, name, formats.get(name), shape)
                for name, shape in shapes.items()
            }
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise BadModelFile(f"{path} is incomplete ({error}); remove it") from error


def _read_matrix(
    file: safe_open, name: str, format_name: str | None, shape: tuple[int, ...]
) -> Matrix:
    """Read one matrix; a tensor without `format_name`. Raises ValueError if its shape differs."""
    if format_name is None:
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} has a different shape than in the model")
        return tensor
    weight_format = FORMATS[format_name]
    codes: Tensor = file.get_tensor(f"{name}.codes")  # type: ignore[no-untyped-call]
    scales: Tensor = file.get_tensor(f"{name}.scales")  # type: ignore[no-untyped-call]
    stored_layout = [(tuple(tensor.shape), tensor.dtype) for tensor in (codes, scales)]
    if len(shape) != 2 or stored_layout != [
        (x, torch.uint8) for x in packed_shapes(weight_format, *shape)
    ]:
        raise ValueError(f"{name} has a different shape than in the model")
    return PackedMatrix(weight_format, shape[0], codes, scales)
