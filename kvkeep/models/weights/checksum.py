"""Packed weights on disk are what was packed: a checksum lies beside them, and is verified.

What decoding reads is verified as it lies in memory, whenever a file is mapped.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from kvkeep.errors import StoreError
from kvkeep.models.weights.packing import Matrix, PackedMatrix
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.files.whole import write_whole


class Checksum:
    """Of tensors, packed or not, taken in the order in which they lie in a file."""

    def __init__(self) -> None:
        self._hash = blake3(max_threads=blake3.AUTO)
        self._name = ""

    def take(self, name: str, piece: bytes) -> None:
        """The next bytes of a tensor."""
        if name != self._name:
            self._hash.update(f"{name}\n".encode())
            self._name = name
        self._hash.update(piece)

    def hexdigest(self) -> str:
        """64 hex digits."""
        return self._hash.hexdigest()


def checksum_of(matrices: Mapping[str, Matrix]) -> str:
    """Of all of them, packed or not, as `write_packed` lays them out."""
    checksum = Checksum()
    for name, matrix in matrices.items():
        if isinstance(matrix, PackedMatrix):
            checksum.take(f"{name}.codes", tensor_bytes(matrix.data))
            checksum.take(f"{name}.scales", tensor_bytes(matrix.scales))
        else:
            checksum.take(name, tensor_bytes(matrix))
    return checksum.hexdigest()


def read_checksum(path: Path) -> str | None:
    """The one that lies beside a file; None where there is none that could be one."""
    try:
        found = _beside(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return found if re.fullmatch("[0-9a-f]{64}", found) else None


def write_checksum(path: Path, checksum: str) -> None:
    """Beside a file. Where that cannot be written, the file is not trusted the next time."""
    with contextlib.suppress(OSError, StoreError):
        write_whole(_beside(path), f"{checksum}\n".encode())


def remove_checksum(path: Path) -> None:
    """To be called before the file is replaced."""
    _beside(path).unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.blake3")
