"""Packed weights on disk are what was packed: a checksum lies beside them, and is verified.

What decoding reads is verified as it lies in memory, whenever a file is mapped. Files that were
packed before there were checksums are compared with the model's tensors, once.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.errors import StoreError
from kvkeep.files.tensors import tensor_bytes
from kvkeep.files.whole import write_whole
from kvkeep.models.packing import PackedMatrix


class Checksum:
    """Of packed matrices, taken in the order in which they lie in a file."""

    def __init__(self) -> None:
        self._hash = blake3()

    def take(self, name: str, tensor: Tensor) -> None:
        """The tensor's name, dtype, shape and bytes."""
        self._hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        self._hash.update(tensor_bytes(tensor))

    def hexdigest(self) -> str:
        """64 hex digits."""
        return self._hash.hexdigest()


def checksum_of(matrices: Mapping[str, PackedMatrix]) -> str:
    """Of all data, then of all scales, as `write_packed` lays them out."""
    checksum = Checksum()
    for name, matrix in matrices.items():
        checksum.take(f"{name}.data", matrix.data)
    for name, matrix in matrices.items():
        checksum.take(f"{name}.scales", matrix.scales)
    return checksum.hexdigest()


def read_checksum(path: Path) -> str | None:
    """The one that lies beside a file; None where there is none that could be one."""
    try:
        found = _beside(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch("[0-9a-f]{64}", found) else None


def write_checksum(path: Path, checksum: str) -> None:
    """Beside a file. Where that cannot be written, the file is compared again the next time."""
    with contextlib.suppress(OSError, StoreError):
        write_whole(_beside(path), f"{checksum}\n".encode())


def remove_checksum(path: Path) -> None:
    """To be called before the file is replaced."""
    _beside(path).unlink(missing_ok=True)


def says_the_same(matrix: PackedMatrix, tensor: Tensor) -> bool:
    """Whether a packed matrix holds the values of a bfloat16 one, `[rows, columns]`.

    To the bit, or, where 8 bits rounded what the model's file has, to half a step of them.
    """
    values = matrix.unpacked().values()
    if torch.equal(values.to(tensor.dtype), tensor):
        return True
    if matrix.bits != 8:
        return False
    steps = matrix.unpacked().scales.float().repeat_interleave(32, 1)
    return bool(((values - tensor.float()).abs() <= 0.51 * steps + tensor.abs() / 128).all())


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.blake3")
