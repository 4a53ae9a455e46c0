"""A converted model as other programs read it."""

from pathlib import Path

import pytest
import torch
from gguf import PoolingType
from safetensors.torch import load_file
from tiny_gguf import tiny_llama, write_gguf

import kvkeep
from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.gguf.convert import convert
from kvkeep.models.spec.pooling import read_pooling
from kvkeep.models.weights.export import export
from kvkeep.models.weights.packed import converted_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from gguf import GGMLQuantizationType as Type

    file = write_gguf(tmp_path / "m.gguf", tiny_llama(), stored=Type.Q5_1)
    convert(file, tmp_path / "own", False)
    return tmp_path / "own"


def test_an_exported_folder_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in folder.iterdir() if not path.name.startswith("packed")
    } | {"model.safetensors"}
    one, other = kvkeep.load_model(str(folder)), kvkeep.load_model(str(tmp_path / "out"))
    assert one.fingerprint == other.fingerprint
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(one.decoder.weights[name], x) for name, x in written.items())


def test_an_exported_embedding_model_keeps_its_pooling(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(num_hidden_layers=1),
        edit=lambda writer: writer.add_pooling_type(PoolingType.LAST),
    )
    convert(file, tmp_path / "own", False)
    export(tmp_path / "own", tmp_path / "out")
    assert read_pooling(tmp_path / "out") == read_pooling(tmp_path / "own")


def test_an_existing_folder_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="already exists"):
        export(folder, folder)
    export(folder, tmp_path / "out")
    with pytest.raises(InvalidArgument, match="is a safetensors folder already"):
        export(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_damaged_model_is_not_exported(folder: Path, tmp_path: Path) -> None:
    path = converted_path(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadModelFile, match="damaged"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
