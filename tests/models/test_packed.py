"""Which weights a loaded model decodes with, and where they are kept."""

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from packed_model import packed_model, spec_of
from safetensors.torch import load_file, save_file
from small import write_small_folder

import kvkeep
from kvkeep.compiled.binding import library
from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.checksum import checksum_of
from kvkeep.models.packed import (
    find_packed,
    matrices,
    packed_path,
    read_packed,
    stored,
    write_packed,
)
from kvkeep.models.packing import PackedMatrix, quantise

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
    assert len(files) == 2  # the other one is the checksum
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


def zero(path: Path, begin: int, count: int) -> None:
    """Damages a file as a failing disk does: its length and time of change stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(count))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def of_own(tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A folder whose model's own file held packed matrices; these; the tensors."""
    model = packed_model(SPEC, 4)
    folder, tensors = tmp_path / "model", dict(model.decoder.tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    shapes, path = matrices(SPEC), packed_path(folder, "int4")
    write_packed(path, shapes, dict.fromkeys(shapes, 4), iter(model.decoder.packed.values()))
    return folder, path, tensors


def same(one: Mapping[str, PackedMatrix], other: Mapping[str, PackedMatrix]) -> bool:
    return checksum_of(one) == checksum_of(other)


@pytest.mark.parametrize("begin", [8_000, 60_000, 150_000])
def test_what_was_rounded_here_and_is_damaged_is_made_anew(
    home: Path, tmp_path: Path, begin: int
) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    whole = checksum_of(find_packed(folder, SPEC, "int8", tensors, progress=False))
    (path,) = home.rglob("*.safetensors")
    zero(path, begin, 64)
    with pytest.warns(RuntimeWarning, match=r"packed-int8.safetensors is damaged.*anew"):
        found = find_packed(folder, SPEC, "int8", tensors, progress=False)
    assert checksum_of(found) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        again = find_packed(folder, SPEC, "int8", {}, progress=False)
    assert checksum_of(again) == whole


def test_what_was_rounded_before_there_were_checksums_is_made_anew(
    home: Path, tmp_path: Path
) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    whole = checksum_of(find_packed(folder, SPEC, "int4", tensors, progress=False))
    (path,) = home.rglob("*.safetensors")
    zero(path, 60_000, 64)
    path.with_name(path.name + ".blake3").unlink()
    assert checksum_of(find_packed(folder, SPEC, "int4", tensors, progress=False)) == whole


def test_what_came_with_the_model_is_verified_against_its_tensors_once(tmp_path: Path) -> None:
    folder, path, tensors = of_own(tmp_path)
    beside = path.with_name(path.name + ".blake3")
    assert not beside.exists()
    first = find_packed(folder, SPEC, "int4", tensors, progress=False)
    assert beside.read_text() == checksum_of(first) + "\n"
    assert same(first, find_packed(folder, SPEC, "int4", {}, progress=False))
    for unusable in ("", "0" * 64, "ÿ"):
        beside.write_text(unusable)
        assert same(first, find_packed(folder, SPEC, "int4", tensors, progress=False))
        assert beside.read_text() == checksum_of(first) + "\n"


@pytest.mark.parametrize("known", [True, False])
def test_what_came_with_the_model_and_is_damaged_is_refused(tmp_path: Path, known: bool) -> None:
    folder, path, tensors = of_own(tmp_path)
    if known:
        find_packed(folder, SPEC, "int4", tensors, progress=False)
    for begin in (8_000, path.stat().st_size - 1_000):  # data of the first, scales of the last
        before = path.read_bytes()
        zero(path, begin, 64)
        with pytest.raises(BadModelFile, match=r"packed-int4.safetensors is damaged: .*weight"):
            find_packed(folder, SPEC, "int4", tensors, progress=False)
        path.write_bytes(before)


@compiled
def test_a_damaged_default_model_is_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    for file in smollm2_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "packed-int4.safetensors"
    path.unlink()
    shutil.copy(smollm2_folder / path.name, path)
    zero(path, 40_000_000, 20_000_000)
    with pytest.raises(BadModelFile, match=r"packed-int4.safetensors is damaged"):
        kvkeep.load_model(str(tmp_path))


def test_a_model_says_what_it_decodes_with() -> None:
    four, again, eight = (packed_model(SPEC, bits).packed_digest for bits in (4, 4, 8))
    assert four == again != eight
    assert len(four) == 64
    assert packed_model(SPEC, None).packed_digest == ""


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
