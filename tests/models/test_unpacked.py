"""Where no kernels read packed weights, they are unpacked once and then mapped."""

import os
from pathlib import Path

import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_gguf import tiny_llama, write_gguf

import kvkeep
from kvkeep.errors import ModelError
from kvkeep.models.hub.source import resolve
from kvkeep.models.weights.packing import PackedMatrix, as_tensor


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(home: Path, tmp_path: Path) -> str:
    return str(write_gguf(tmp_path / "m.gguf", tiny_llama(), stored=Type.Q4_0))


def unpacked(home: Path) -> list[Path]:
    return sorted((home / "unpacked").rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_are_unpacked_once_and_then_mapped(home: Path, file: str, dtype: str) -> None:
    model = kvkeep.load_model(file, dtype=dtype, weights="bf16")
    (path,) = unpacked(home)
    made = path.stat().st_mtime_ns
    again = kvkeep.load_model(file, dtype=dtype, weights="bf16")
    assert unpacked(home)[0].stat().st_mtime_ns == made
    maps = {Path(entry.path) for entry in psutil.Process().memory_maps()}
    assert path.resolve() in maps
    packed = kvkeep.load_model(file).decoder.packed
    for name, matrix in packed.items():
        assert isinstance(matrix, PackedMatrix)
        wanted = as_tensor(matrix, getattr(torch, dtype))
        assert torch.equal(model.decoder.tensors[name], wanted)
        assert torch.equal(again.decoder.tensors[name], wanted)


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_unpacked_file_is_written_again(home: Path, file: str, damage: str) -> None:
    wanted = kvkeep.load_model(file, dtype="float32").fingerprint
    (path,) = unpacked(home)
    content = path.read_bytes()
    path.write_bytes(content[:-100] + (b"" if damage == "truncated" else bytes(100)))
    with pytest.warns(RuntimeWarning, match=r"float32.safetensors is damaged.*again"):
        assert kvkeep.load_model(file, dtype="float32").fingerprint == wanted
    assert path.read_bytes() == content


def test_unpacked_files_of_earlier_states_are_removed(home: Path, file: str) -> None:
    kvkeep.load_model(file, dtype="float32")
    (before,) = unpacked(home)
    own = resolve(file, progress=False) / "packed.safetensors"
    os.utime(own, ns=(1, 1))
    other = before.parent.parent.with_name("another-model") / "1-2"
    other.mkdir(parents=True)
    kvkeep.load_model(file, dtype="float32")
    (now,) = unpacked(home)
    assert now.parent != before.parent
    assert other.exists()


def test_an_unwritable_home_is_a_model_error(home: Path, file: str) -> None:
    resolve(file, progress=False)
    (home / "unpacked").write_text("")
    with pytest.raises(ModelError, match="KVKEEP_HOME"):
        kvkeep.load_model(file, dtype="float32")
