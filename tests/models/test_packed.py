"""Which weights a loaded model decodes with, and where they are kept."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from packed_model import packed_model, spec_of
from safetensors.torch import load_file, save_file
from small_models import write_small_folder

import kvkeep
from kvkeep.compiled.binding import kernel_library
from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import EMBEDDING
from kvkeep.models.weights.packed import (
    converted_file,
    converted_path,
    load_converted,
    load_quantised,
)
from kvkeep.models.weights.packed_file import NewMatrix, checksum_of, read_packed, write_packed
from kvkeep.models.weights.packing import Matrix, PackedMatrix, quantise
from kvkeep.models.weights.tensors import matrix_shapes

compiled = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
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


def values(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, PackedMatrix)
    return matrix.values()


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_matrices_are_rounded_and_packed_once(
    home: Path, tmp_path: Path, weights: str, bits: int
) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    found = load_quantised(folder, SPEC, weights, tensors, progress=False)  # type: ignore[arg-type]
    assert found.keys() == matrix_shapes(SPEC).keys()
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = quantise(tensors[name], bits).values()  # type: ignore[arg-type]
    assert torch.equal(values(found[name]), wanted)
    head = found["lm_head.weight"]
    assert isinstance(head, PackedMatrix)
    assert head.format.name == "Q8_0"
    files = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    assert len(files) == 2  # the other one is the checksum
    load_quantised(folder, SPEC, weights, {}, progress=False)  # type: ignore[arg-type]
    assert files == {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    assert not list(folder.glob("packed*"))


MEASURED = """
import resource, sys
from dataclasses import replace
from pathlib import Path

import torch
from packed_model import spec_of
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.weights.packed import load_quantised

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

spec = replace(spec_of(), vocab_size=100_000, layers=1)
tensors = {x: torch.ones(s, dtype=torch.bfloat16) for x, s in tensor_shapes(spec).items()}
before = peak()
load_quantised(Path(), spec, sys.argv[1], tensors, False)
print((peak() - before) / tensors["model.embed_tokens.weight"].numel())
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="the peak has another unit elsewhere")
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_large_matrices_are_packed_some_rows_at_a_time(home: Path, weights: str) -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, weights],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"},
        check=True,
        capture_output=True,
    )
    assert float(done.stdout) < 7  # bytes for each weight, of which the mapped result has 2


def test_changed_weights_in_the_same_folder_are_packed_again(home: Path, tmp_path: Path) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    first = load_quantised(folder, SPEC, "int8", tensors, progress=False)["lm_head.weight"]
    tensors = dict(packed_model(SPEC, None, seed=1).decoder.tensors)
    save_file(tensors, folder / "model.safetensors")
    second = load_quantised(folder, SPEC, "int8", tensors, progress=False)["lm_head.weight"]
    assert not torch.equal(values(first), values(second))


def test_weights_are_packed_again_for_another_config(home: Path, tmp_path: Path) -> None:
    """The order of rows that is packed depends on the RoPE."""
    folder, tensors = folder_with(tmp_path / "model")
    (folder / "config.json").write_text('{"partial_rotary_factor": 0.5}')
    first = load_quantised(folder, SPEC, "int8", tensors, progress=False)
    (folder / "config.json").write_text('{"partial_rotary_factor": 1.0}')
    name = "model.layers.0.self_attn.q_proj.weight"
    reordered = {**tensors, name: tensors[name].flip(0)}
    second = load_quantised(folder, SPEC, "int8", reordered, progress=False)
    assert torch.equal(values(second[name]), values(first[name]).flip(0))


def test_packed_weights_of_earlier_states_of_a_folder_are_removed(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other, other_tensors = folder_with(tmp_path / "other" / "model")
    folder, tensors = folder_with(tmp_path / "model")
    load_quantised(other, SPEC, "int8", other_tensors, progress=False)
    for weights in ("int8", "int4"):
        load_quantised(folder, SPEC, weights, tensors, progress=False)
    assert len(list(home.rglob("*.safetensors"))) == 3
    tensors = dict(packed_model(SPEC, None, seed=1).decoder.tensors)
    save_file(tensors, folder / "model.safetensors")
    load_quantised(folder, SPEC, "int8", tensors, progress=False)
    assert [path.name for path in home.rglob("*.safetensors")] == ["int8.safetensors"] * 2
    load_quantised(other, SPEC, "int8", {}, progress=False)  # those of its namesake are there


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "another model"])
def test_a_damaged_file_is_named_in_the_error(home: Path, tmp_path: Path, damage: str) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    load_quantised(folder, SPEC, "int4", tensors, progress=False)
    (path,) = home.rglob("*.safetensors")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        save_file(load_file(path), path, {"version": "0"})
    else:
        save_file({"x": torch.zeros(1)}, path, {"version": "1"})
    with pytest.raises(BadModelFile, match="int4"):
        read_packed(path, matrix_shapes(SPEC))


def zero(path: Path, begin: int, count: int) -> None:
    """Damages a file as a failing disk does: its length and time of change stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(count))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def converted_file_with(tmp_path: Path) -> tuple[Path, dict[str, Matrix]]:
    """What a GGUF file was taken over as: where it lies, and what is in it."""
    model = packed_model(SPEC, 4)
    found: dict[str, Matrix] = dict(model.decoder.tensors)
    found |= {name: of for name, of in model.decoder.packed.items() if name in found}
    found[EMBEDDING] = model.decoder.packed["lm_head.weight"]
    path, new = converted_path(tmp_path), {}
    for name, shape in tensor_shapes(SPEC).items():
        matrix = found[name]
        stored_format = matrix.format if isinstance(matrix, PackedMatrix) else matrix.dtype
        new[name] = NewMatrix(stored_format, shape, iter([matrix]))
    write_packed(path, new, "converting", progress=False)
    return path, found


def same(one: Mapping[str, Matrix], other: Mapping[str, Matrix]) -> bool:
    return checksum_of(one) == checksum_of(other)


@pytest.mark.parametrize("begin", [8_000, 60_000, 150_000])
def test_a_damaged_rounded_file_is_packed_again_with_a_warning(
    home: Path, tmp_path: Path, begin: int
) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    whole = checksum_of(load_quantised(folder, SPEC, "int8", tensors, progress=False))
    (path,) = home.rglob("*.safetensors")
    zero(path, begin, 64)
    with pytest.warns(RuntimeWarning, match=r"int8.safetensors is damaged.*again"):
        found = load_quantised(folder, SPEC, "int8", tensors, progress=False)
    assert checksum_of(found) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        again = load_quantised(folder, SPEC, "int8", {}, progress=False)
    assert checksum_of(again) == whole


def test_a_rounded_file_without_a_checksum_is_packed_again(home: Path, tmp_path: Path) -> None:
    folder, tensors = folder_with(tmp_path / "model")
    whole = checksum_of(load_quantised(folder, SPEC, "int4", tensors, progress=False))
    (path,) = home.rglob("*.safetensors")
    zero(path, 60_000, 64)
    path.with_name(path.name + ".blake3").unlink()
    assert checksum_of(load_quantised(folder, SPEC, "int4", tensors, progress=False)) == whole


def test_a_converted_file_is_read_back_unchanged(tmp_path: Path) -> None:
    path, wanted = converted_file_with(tmp_path)
    found = load_converted(path, SPEC)
    assert found.keys() == wanted.keys()
    for name, matrix in wanted.items():
        if isinstance(matrix, PackedMatrix):
            assert torch.equal(values(found[name]), matrix.values())
        else:
            assert torch.equal(found[name], matrix)  # type: ignore[arg-type]


def test_a_converted_file_is_verified_on_every_load(tmp_path: Path) -> None:
    path, _ = converted_file_with(tmp_path)
    first = load_converted(path, SPEC)
    beside = path.with_name(path.name + ".blake3")
    assert beside.read_text() == checksum_of(first) + "\n"
    for unusable in ("", "0" * 64, "ÿ"):
        beside.write_text(unusable)
        with pytest.raises(BadModelFile, match="damaged"):
            load_converted(path, SPEC)
    beside.unlink()
    with pytest.raises(BadModelFile, match="damaged"):
        load_converted(path, SPEC)


def test_a_damaged_converted_file_is_refused(tmp_path: Path) -> None:
    path, _ = converted_file_with(tmp_path)
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    last = path.stat().st_size - 64  # of the norms, which are not packed
    for begin in (header, path.stat().st_size // 2, last):
        before = path.read_bytes()
        zero(path, begin, 64)
        with pytest.raises(BadModelFile, match=r"packed\.safetensors is damaged"):
            load_converted(path, SPEC)
        path.write_bytes(before)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    path, _ = converted_file_with(tmp_path)
    for other in (replace(SPEC, layers=2), replace(SPEC, layers=4), replace(SPEC, vocab_size=80)):
        with pytest.raises(BadModelFile, match="is incomplete"):
            load_converted(path, other)


@compiled
def test_a_damaged_default_model_is_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    for file in smollm2_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = converted_path(tmp_path)
    path.unlink()
    shutil.copy(smollm2_folder / path.name, path)
    zero(path, 40_000_000, 20_000_000)
    with pytest.raises(BadModelFile, match=r"packed\.safetensors is damaged"):
        kvkeep.load_model(str(tmp_path))


def test_the_digest_identifies_the_packed_weights() -> None:
    four, again, eight = (packed_model(SPEC, bits).packed_digest for bits in (4, 4, 8))
    assert four == again != eight
    assert len(four) == 64
    assert packed_model(SPEC, None).packed_digest == ""
    half = torch.ones(4, 4, dtype=torch.float16)  # as a GGUF file may have a matrix
    assert checksum_of({"x": half}) != checksum_of({"x": half * (1 + 2**-10)})


def test_rows_that_are_not_whole_groups_are_refused(home: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    odd = replace(SPEC, intermediate_size=330)
    with pytest.raises(InvalidArgument, match="330"):
        load_quantised(tmp_path, odd, "int4", {}, progress=False)


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    with pytest.raises(InvalidArgument, match="bf16, int8, int4"):
        kvkeep.load_model(str(folder), weights="int3")


def test_packed_weights_without_kernels_are_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    with pytest.raises(InvalidArgument, match=r"no.* for this model"):
        kvkeep.load_model(str(folder), dtype="float32", weights="int4")


@compiled
def test_the_default_model_stays_packed_as_in_its_file(smollm2_folder: Path) -> None:
    model, plain = kvkeep.load_model(), kvkeep.load_model(weights="bf16")
    assert converted_file(smollm2_folder) is not None
    assert (model.weights, plain.weights) == ("Q4_1", "bf16")
    assert not plain.decoder.packed
    assert all(tensor.dim() == 1 for tensor in model.decoder.tensors.values())
    held = [*model.decoder.tensors.values(), *model.decoder.packed.values()]
    assert sum(each.nbytes for each in held) <= 1.05 * converted_path(smollm2_folder).stat().st_size
    weights, wanted = model.decoder.weights, plain.decoder.tensors
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert model.fingerprint == plain.fingerprint
