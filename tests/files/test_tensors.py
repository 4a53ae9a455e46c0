"""Safetensors files: any reader opens them, and every tensor is aligned for the kernels."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvkeep.storage.files.tensors import (
    ALIGNMENT,
    DTYPE_NAMES,
    TensorEntry,
    contiguous_chunks,
    tensor_bytes,
    write_tensors,
)


def test_safetensors_reads_written_files(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(6, device="cpu").reshape(2, 3).to(dtype) for dtype in DTYPE_NAMES
    }
    tensors["empty"] = torch.zeros(0, 3, device="cpu")
    entries = {
        name: TensorEntry(DTYPE_NAMES[t.dtype], tuple(t.shape), t.nbytes)
        for name, t in tensors.items()
    }
    write_tensors(
        tmp_path / "a.safetensors",
        entries,
        (tensor_bytes(tensor) for tensor in tensors.values()),
        {"made": "for a test"},
    )
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    data = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % ALIGNMENT == 0
    assert json.loads(data[8 : 8 + length])["__metadata__"] == {"made": "for a test"}


def test_a_failure_while_writing_tensors_leaves_no_file(tmp_path: Path) -> None:
    def chunks() -> object:
        yield b"1234"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_tensors(tmp_path / "a.safetensors", {"a": TensorEntry("U8", (8,), 8)}, chunks(), {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_chunks_of_strided_tensors_are_their_contiguous_bytes(order: tuple[int, int, int]) -> None:
    tensor = torch.arange(24, dtype=torch.int32, device="cpu").reshape(2, 3, 4).permute(order)
    for part in (tensor, tensor[:1], tensor[..., 1:], tensor[:0]):
        joined = b"".join(bytes(chunk) for chunk in contiguous_chunks(part))
        assert joined == part.contiguous().numpy().tobytes()
