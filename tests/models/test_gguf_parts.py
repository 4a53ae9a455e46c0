"""GGUF models in several files, and GGUF files that are not models."""

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import tiny_llama, write_gguf

from kvkeep import load_model
from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.hub.library import pulled_models
from kvkeep.models.hub.names import add_name, named_models
from kvkeep.models.hub.source import local_folder, resolve


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three files, written by gguf-py."""
    write_gguf(tmp_path / "m.gguf", tiny_llama(), in_a_part=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in files] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return files


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))


def test_split_model_equals_the_single_file(parts: list[Path], tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "whole.gguf", tiny_llama()), tmp_path / "whole", False)
    convert(parts[0], tmp_path / "parts", False)
    one, other = (load_file(tmp_path / name / "packed.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "parts" / name).read_text()


def test_split_model_is_converted_once_by_any_part(parts: list[Path]) -> None:
    folder = resolve(str(parts[1]), progress=False)
    assert [local_folder(str(part)) for part in parts] == [folder] * 3
    assert load_model(str(parts[2])).folder == folder
    parts[2].write_bytes(parts[2].read_bytes())  # another state of it, by its time
    assert local_folder(str(parts[0])) is None


def test_missing_parts_are_named_in_the_error(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(BadModelFile, match=r"one of 3 parts .*: m-00002-of-00003\.gguf; fetch"):
        load_model(str(parts[0]))


def test_split_model_of_links_is_the_model_of_its_files(parts: list[Path], tmp_path: Path) -> None:
    """In the cache of the hub, files are named by digests and linked to under their names."""
    linked = []
    for index, part in enumerate(parts):
        blob = part.rename(tmp_path / f"{index:064x}")
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        linked.append(tmp_path / "snapshot" / part.name)
        linked[-1].symlink_to(f"../{blob.name}")
    folder = resolve(str(linked[1]), progress=False)
    assert [local_folder(str(part)) for part in linked] == [folder] * 3
    assert [model.name for model in pulled_models()] == [str(linked[0])]
    add_name("mine", linked[0])
    assert load_model("mine").folder == folder


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00003.gguf"])
def test_split_model_is_found_by_a_link_to_one_of_its_files(
    parts: list[Path], tmp_path: Path, name: str
) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / name
    link.symlink_to(parts[0])
    add_name("mine", link)
    assert named_models()["mine"].nbytes == sum(part.stat().st_size for part in parts)
    assert resolve("mine", progress=False) == resolve(str(parts[1]), progress=False)


def test_truncated_part_is_named_in_the_error(parts: list[Path], tmp_path: Path) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    with pytest.raises(BadModelFile, match="m-00003-of-00003"):
        convert(parts[0], tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_parts_with_swapped_names_are_refused(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    with pytest.raises(BadModelFile, match=r"part 2 \(from 0\) of 3, not part 1 of 3"):
        load_model(str(parts[0]))


def test_renamed_part_is_refused(parts: list[Path], tmp_path: Path) -> None:
    alone = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(BadModelFile, match="of a split model, but its name does not say so"):
        load_model(str(alone))


def test_part_number_beyond_the_count_is_refused(parts: list[Path]) -> None:
    wrong = parts[0].rename(parts[0].with_name("m-00004-of-00003.gguf"))
    with pytest.raises(BadModelFile, match="says that it is part 4 of 3"):
        load_model(str(wrong))


def test_parts_of_different_models_are_refused(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "m.gguf", tiny_llama(num_hidden_layers=1), in_a_part=5)
    shutil.copy(tmp_path / "other" / "m-00002-of-00003.gguf", parts[1])
    with pytest.raises(BadModelFile, match=r"parts of|which another part"):
        load_model(str(parts[0]))


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("mmproj", "the projector of a vision model, not a language model"),
        ("adapter", "an adapter"),
        ("imatrix", "an importance matrix"),
    ],
)
def test_gguf_files_that_are_not_models_are_refused(
    tmp_path: Path, kind: str, description: str
) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(),
        "clip" if kind == "mmproj" else "llama",
        edit=lambda writer: writer.add_type(kind),
    )
    with pytest.raises(UnsupportedModel, match=description):
        convert(path, tmp_path / "out", False)


def test_projector_without_a_type_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), "clip")
    with pytest.raises(UnsupportedModel, match="the projector of a vision model"):
        convert(path, tmp_path / "out", False)


@pytest.mark.parametrize("model", [None, "no_vocab"])
def test_model_without_a_tokenizer_is_refused(tmp_path: Path, model: str | None) -> None:
    def tokens(writer: gguf.GGUFWriter) -> None:
        if model is not None:
            writer.add_tokenizer_model(model)

    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), tokens=tokens)
    with pytest.raises(UnsupportedModel, match="has no tokenizer"):
        convert(path, tmp_path / "out", False)
