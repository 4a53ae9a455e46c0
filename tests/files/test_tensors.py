"""Safetensors files: any reader opens them, and kernels find every tensor aligned."""

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
    dense_chunks,
    tensor_bytes,
    write_tensors,
)


def test_any_reader_opens_what_is_written(tmp_path: Path) -> None:
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
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    data = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % ALIGNMENT == 0
    assert json.loads(data[8 : 8 + length])["__metadata__"] == {"made": "for a test"}


def test_a_file_whose_tensors_could_not_all_be_made_is_not_there(tmp_path: Path) -> None:
    def pieces() -> object:
        yield b"1234"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_tensors(tmp_path / "a.safetensors", {"a": TensorEntry("U8", (8,), 8)}, pieces(), {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_pieces_of_any_strides_are_the_bytes_in_order(order: tuple[int, int, int]) -> None:
    tensor = torch.arange(24, dtype=torch.int32, device="cpu").reshape(2, 3, 4).permute(order)
    for part in (tensor, tensor[:1], tensor[..., 1:], tensor[:0]):
        joined = b"".join(bytes(piece) for piece in dense_chunks(part))
        assert joined == part.contiguous().numpy().tobytes()
