"""Which weights a loaded model decodes with, and where they are kept."""

from pathlib import Path

import pytest
import torch
from packed_model import packed_model, spec_of
from safetensors.torch import load_file, save_file
from small import write_small_folder

import kvkeep
from kvkeep.compiled.library import library
from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.packed import find_packed, matrices, read_packed, stored
from kvkeep.models.packing import quantise

compiled = pytest.mark.skipif(library() is None, reason="no compiled kernels here")
SPEC = spec_of()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def folder_with(path: Path, seed: int = 0) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model's tensors in a folder, as `load_model` finds them."""
    path.mkdir()
    tensors = dict(packed_model(SPEC, None, seed).decoder.tensors)
    save_file(tensors, path / "model.safetensors")
    return path, tensors


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_they_are_packed_once(home: Path, tmp_path: Path, weights: str, bits: int) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    found = find_packed(folder, SPEC, weights, tensors, progress=False)  # type: ignore[arg-type]
    assert found.keys() == matrices(SPEC).keys()
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = quantise(tensors[name], bits).values()  # type: ignore[arg-type]
    assert torch.equal(found[name].unpacked().values(), wanted)
    assert found["lm_head.weight"].bits == 8
    files = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    assert len(files) == 1
    find_packed(folder, SPEC, weights, {}, progress=False)  # type: ignore[arg-type]
    assert files == {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    assert not list(folder.glob("packed*"))


def test_other_weights_under_the_same_name_are_packed_anew(home: Path, tmp_path: Path) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    first = find_packed(folder, SPEC, "int8", tensors, progress=False)["lm_head.weight"]
    tensors = dict(packed_model(SPEC, None, seed=1).decoder.tensors)
    save_file(tensors, folder / "model.safetensors")
    second = find_packed(folder, SPEC, "int8", tensors, progress=False)["lm_head.weight"]
    assert not torch.equal(first.data, second.data)


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "another model"])
def test_a_damaged_file_is_refused_by_name(home: Path, tmp_path: Path, damage: str) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    find_packed(folder, SPEC, "int4", tensors, progress=False)
    (path,) = home.rglob("*.safetensors")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        save_file(load_file(path), path, {"version": "0"})
    else:
        save_file({"x": torch.zeros(1)}, path, {"version": "1"})
    with pytest.raises(BadModelFile, match="packed-int4"):
        read_packed(path, SPEC)


def test_rows_that_are_no_whole_groups_are_refused(home: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    odd = replace(SPEC, intermediate_size=330)
    with pytest.raises(InvalidArgument, match="330"):
        find_packed(tmp_path, odd, "int4", {}, progress=False)


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    with pytest.raises(InvalidArgument, match="bf16, int8, int4"):
        kvkeep.load_model(str(folder), weights="int3")


def test_packed_weights_where_there_are_no_kernels_are_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    with pytest.raises(InvalidArgument, match=r"no.* for this model"):
        kvkeep.load_model(str(folder), dtype="float32", weights="int4")


@compiled
def test_the_default_model_is_read_as_its_file_packs_it(smollm2_folder: Path) -> None:
    assert stored(smollm2_folder) == "int4"
    assert kvkeep.load_model().weights == "int4"
    assert kvkeep.load_model(weights="bf16").weights == "bf16"
    packed = read_packed(smollm2_folder / "packed-int4.safetensors", kvkeep.load_model().spec)
    tensors = kvkeep.load_model(weights="bf16").decoder.tensors
    for name in ("model.layers.7.self_attn.q_proj.weight", "model.layers.29.mlp.up_proj.weight"):
        values = packed[name].unpacked().values().bfloat16()
        assert torch.equal(values, tensors[name])
    head = packed["lm_head.weight"].unpacked().values().bfloat16()
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
