"""Of layers that are not all alike, what a GGUF file says and what it leaves to its family."""

from pathlib import Path

import gguf
import pytest
import transformers
from gguf import GGUFWriter
from models import test_gguf_experts as experts
from models.test_gguf_families import MADE, Edit, made, write

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.config import read_spec
from kvkeep.models.gguf_convert import convert
from kvkeep.models.spec import ModelSpec


def spec_of(kind: str, edit: Edit, folder: Path) -> ModelSpec:
    convert(write(folder / "m.gguf", kind, made(kind), edit=edit), folder / "out", False)
    return read_spec(folder / "out")


def without(key: str) -> Edit:
    """key: as gguf-py writes it, `{arch}` in it."""

    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0][key.format(arch=writer.arch)]

    return edit


PATTERN = gguf.Keys.Attention.SLIDING_WINDOW_PATTERN
LOCAL = [True, False, False, True, True, False, True]


@pytest.mark.parametrize(
    ("kind", "edit", "local", "window"),
    [
        ("gemma2", lambda w: None, (0, 2, 4, 6), 20),
        ("gemma2", without(gguf.Keys.Attention.SLIDING_WINDOW), (0, 2, 4, 6), 4096),
        ("gemma3", lambda w: None, (0, 1, 2, 3, 4, 6), 20),
        ("gemma3", without(gguf.Keys.Attention.SLIDING_WINDOW), (), 0),
        ("cohere2", lambda w: None, (0, 1, 2, 4, 5, 6, 8), 20),
        ("exaone4", lambda w: None, (0, 1, 2, 4, 5, 6, 8), 20),
        ("exaone4", without(PATTERN), (0, 1, 2, 4, 5, 6, 8), 20),
        ("exaone4-alike", lambda w: None, (), 0),
        ("olmo3", without(PATTERN), (0, 1, 2, 4, 5, 6, 8), 20),
        ("olmo2", lambda w: None, (), 0),
        ("gemma3n", lambda w: None, (0, 1, 3, 4, 6, 7), 20),
        ("gemma3n", without(PATTERN), (0, 1, 2, 3, 5, 6, 7, 8), 20),
        ("gemma3", lambda w: w.add_sliding_window_pattern(3), (0, 1, 3, 4, 6), 20),
        ("gemma3", lambda w: w.add_sliding_window_pattern(LOCAL), (0, 3, 4, 6), 20),
    ],
)
def test_layers_are_local_as_the_file_says(
    kind: str, edit: Edit, local: tuple[int, ...], window: int, tmp_path: Path
) -> None:
    spec = spec_of(kind, edit, tmp_path)
    assert (spec.local_layers, spec.window) == (local, window)


@pytest.mark.parametrize(
    ("kind", "edit", "error", "why"),
    [
        ("gemma3", lambda w: w.add_sliding_window_pattern([True]), BadModelFile, "each of 7"),
        ("gemma3", lambda w: w.add_sliding_window_pattern(0), BadModelFile, "each of 7"),
        ("gemma3", lambda w: w.add_sliding_window_pattern([True] * 7), UnsupportedModel, "none of"),
        ("gemma2", lambda w: w.add_rope_freq_base_swa(500.0), UnsupportedModel, "freq_base_swa"),
    ],
)
def test_layers_that_cannot_be_are_refused(
    kind: str, edit: Edit, error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        spec_of(kind, edit, tmp_path)


@pytest.mark.parametrize(
    ("kind", "layers", "wide"), [("gemma2", 46, 32), ("gemma3", 62, 32), ("gemma3", 7, 16)]
)
def test_the_largest_gemma_scales_by_what_a_head_would_be_wide(
    kind: str, layers: int, wide: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 / 8, of the others by their heads of 16: GGUF does not say it."""
    name, architecture, changes = MADE[kind]
    sizes = {"head_dim": 16, "num_hidden_layers": layers, "rope_parameters": None}
    monkeypatch.setitem(MADE, kind, (name, architecture, changes | sizes))
    assert spec_of(kind, lambda w: None, tmp_path).softmax_scale == wide**-0.5


@pytest.mark.parametrize("kind", ["ministral3", "gpt-oss"])
def test_rope_that_a_file_does_not_scale_is_not_scaled(kind: str, tmp_path: Path) -> None:
    """Though the config classes of these families scale it where a config says nothing."""

    def edit(writer: GGUFWriter) -> None:
        for key in [key for key in writer.kv_data[0] if ".rope.scaling." in key]:
            del writer.kv_data[0][key]

    if kind == "gpt-oss":
        path = experts.write(tmp_path / "m.gguf", kind, experts.made(kind), edit=edit)
        convert(path, tmp_path / "out", False)
    else:
        spec_of(kind, edit, tmp_path)
    assert read_spec(tmp_path / "out").rope.kind == "default"
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.rope_parameters["rope_type"] == "default"
