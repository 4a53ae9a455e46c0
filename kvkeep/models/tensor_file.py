"""Safetensors files, written tensor by tensor: no more than one of them is in memory at a time."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIGNMENT = 64  # bytes: kernels read whole cache lines


@dataclass(frozen=True)
class Entry:
    """What the header says of a tensor. dtype: safetensors' name of it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_tensors(
    path: Path,
    entries: Mapping[str, Entry],
    pieces: Iterable[bytes | memoryview],
    metadata: Mapping[str, str],
) -> None:
    """pieces: the bytes of all tensors, in the order of the entries, however they are cut."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % ALIGNMENT)  # behind 8 bytes of length
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for piece in pieces:
            out.write(piece)
