"""Local layers and RoPE scaling of GGUF files, stated or left to the family."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from gguf import GGUFWriter
from models import test_gguf_experts as experts
from models.gguf_kinds import MADE, random_model
from models.gguf_writing import Edit, write

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.rope import rope_spec


def spec_of(kind: str, edit: Edit, folder: Path) -> ModelSpec:
    convert(write(folder / "m.gguf", kind, random_model(kind), edit=edit), folder / "out", False)
    return read_spec(folder / "out")


def without_field(key: str) -> Edit:
    """key: as gguf-py writes it, `{arch}` in it."""

    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0][key.format(arch=writer.arch)]

    return edit


def set_field(add: str, *values: Any) -> Edit:
    """Return an edit that sets or replaces a field, by the name of gguf-py's method."""

    def edit(writer: GGUFWriter) -> None:
        fresh = GGUFWriter("unused", writer.arch)
        getattr(fresh, add)(*values)
        writer.kv_data[0].update(fresh.kv_data[0])

    return edit


def factor_without_type(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(4.0)


def one_table(writer: GGUFWriter) -> None:
    del writer.tensors[0]["rope_factors_long.weight"]


def image_rope_sections(writer: GGUFWriter) -> None:
    writer.add_rope_dimension_sections([4, 4, 4, 4])


PATTERN = gguf.Keys.Attention.SLIDING_WINDOW_PATTERN
LOCAL = [True, False, False, True, True, False, True]


@pytest.mark.parametrize(
    ("kind", "edit", "local", "window"),
    [
        ("gemma2", lambda w: None, (0, 2, 4, 6), 20),
        ("gemma2", without_field(gguf.Keys.Attention.SLIDING_WINDOW), (0, 2, 4, 6), 4096),
        ("gemma3", lambda w: None, (0, 1, 2, 3, 4, 6), 20),
        ("gemma3", without_field(gguf.Keys.Attention.SLIDING_WINDOW), (), 0),
        ("cohere2", lambda w: None, (0, 1, 2, 4, 5, 6, 8), 20),
        ("exaone4", lambda w: None, (0, 1, 2, 4, 5, 6, 8), 20),
        ("exaone4", without_field(PATTERN), (0, 1, 2, 4, 5, 6, 8), 20),
        ("exaone4-alike", lambda w: None, (), 0),
        ("olmo3", without_field(PATTERN), (0, 1, 2, 4, 5, 6, 8), 20),
        ("olmo2", lambda w: None, (), 0),
        ("gemma3n", lambda w: None, (0, 1, 3, 4, 6, 7), 20),
        ("gemma3n", without_field(PATTERN), (0, 1, 2, 3, 5, 6, 7, 8), 20),
        ("gemma3", lambda w: w.add_sliding_window_pattern(3), (0, 1, 3, 4, 6), 20),
        ("gemma3", lambda w: w.add_sliding_window_pattern(LOCAL), (0, 3, 4, 6), 20),
    ],
)
def test_local_layers_follow_the_file(
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
        ("gemma2", factor_without_type, UnsupportedModel, "scaling.factor 4.0 with .*'none'"),
        ("gemma4", lambda w: w.add_rope_scaling_attn_factors(2.0), UnsupportedModel, "attn_factor"),
        ("gemma4", set_field("add_rope_dimension_count_swa", 16), UnsupportedModel, "count_swa 16"),
        (
            "cohere2",
            without_field(gguf.Keys.Attention.SLIDING_WINDOW),
            BadModelFile,
            "sliding_window",
        ),
        ("cohere2", without_field(gguf.Keys.LLM.LOGIT_SCALE), BadModelFile, "logit_scale"),
        ("phi4-mini", one_table, UnsupportedModel, "rope_factors_short.weight, but"),
        ("qwen3vl", image_rope_sections, UnsupportedModel, "dimension_sections"),
    ],
)
def test_invalid_layers_are_refused(
    kind: str, edit: Edit, error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        spec_of(kind, edit, tmp_path)


@pytest.mark.parametrize(
    ("kind", "layers", "wide"), [("gemma2", 46, 32), ("gemma3", 62, 32), ("gemma3", 7, 16)]
)
def test_largest_gemma_has_its_own_attention_scale(
    kind: str, layers: int, wide: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 / 8, where the others scale by their head_dim of 16: GGUF does not state it."""
    name, architecture, changes = MADE[kind]
    sizes = {"head_dim": 16, "num_hidden_layers": layers, "rope_parameters": None}
    monkeypatch.setitem(MADE, kind, (name, architecture, changes | sizes))
    assert spec_of(kind, lambda w: None, tmp_path).softmax_scale == wide**-0.5


@pytest.mark.parametrize("kind", ["ministral3", "gpt-oss"])
def test_unscaled_rope_stays_unscaled(kind: str, tmp_path: Path) -> None:
    """The config classes of these families scale RoPE by default."""

    def edit(writer: GGUFWriter) -> None:
        for key in [key for key in writer.kv_data[0] if ".rope.scaling." in key]:
            del writer.kv_data[0][key]

    if kind == "gpt-oss":
        path = experts.write(tmp_path / "m.gguf", kind, experts.random_model(kind), edit=edit)
        convert(path, tmp_path / "out", False)
    else:
        spec_of(kind, edit, tmp_path)
    assert read_spec(tmp_path / "out").rope.kind == "default"
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_type"] == "default"


def test_gemma4_logits_softcap_defaults_to_30(tmp_path: Path) -> None:
    """As llama.cpp does: 30, of which published files of the converter's first days say nothing."""
    for name, cap, expected in (("none", None, 30.0), ("zero", 0.0, 0.0), ("five", 5.0, 5.0)):
        folder = tmp_path / name
        folder.mkdir()
        edit = without_field(gguf.Keys.LLM.FINAL_LOGIT_SOFTCAPPING)
        if cap is not None:
            edit = set_field("add_final_logit_softcapping", cap)
        assert spec_of("gemma4", edit, folder).logits_softcap == expected


def test_gemma4_scales_rope_of_global_layers(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = spec_of("gemma4", lambda w: None, tmp_path / "plain")
    scaled = spec_of("gemma4", lambda w: w.add_rope_scaling_factor(4.0), tmp_path)
    expected = [each / 4 for each in plain.rope.inverse_frequencies]
    assert list(scaled.rope.inverse_frequencies) == pytest.approx(expected)
    assert scaled.local_rope == plain.local_rope


@pytest.mark.parametrize(
    ("kind", "whole", "near"),
    [("gemma3", 1.25, 1.25), ("gemma3n", 1.25, 1.25), ("olmo3", 1.25**2, 1.0)],
)
def test_attn_factor_applies_to_local_layers_except_olmo3(
    kind: str, whole: float, near: float, tmp_path: Path
) -> None:
    """For OLMo 3 it multiplies the model's own yarn_attn_factor."""
    spec = spec_of(kind, lambda w: w.add_rope_scaling_attn_factors(1.25), tmp_path)
    (tmp_path / "plain").mkdir()
    plain = spec_of(kind, lambda w: None, tmp_path / "plain")
    for rope, before, factor in (
        (spec.rope, plain.rope, whole),
        (spec.local_rope or spec.rope, plain.local_rope or plain.rope, near),
    ):
        assert rope.attention_scaling == pytest.approx(factor)
        assert rope.inverse_frequencies == pytest.approx(before.inverse_frequencies)


def test_temperature_is_ignored_in_other_families(tmp_path: Path) -> None:
    spec = spec_of("granite", lambda w: w.add_attn_temperature_scale(0.5), tmp_path)
    assert (spec.architecture, spec.max_positions) == ("GraniteForCausalLM", 512)


def test_llama3_divisors_are_kept_with_a_temperature(tmp_path: Path) -> None:
    """Both have a field original_max_position_embeddings, with different lengths."""
    (tmp_path / "plain").mkdir()
    rope = spec_of("ministral3", _unscaled, tmp_path / "plain").rope.inverse_frequencies
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = rope_spec(llama3, 1 / rope[1] ** (len(rope)), 2 * len(rope), 8192).inverse_frequencies
    divisors = [before / after for before, after in zip(rope, scaled, strict=True)]

    def edit(writer: GGUFWriter) -> None:
        _unscaled(writer)
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))

    spec = spec_of("ministral3", edit, tmp_path)
    assert spec.architecture == "Ministral3ForCausalLM"
    assert spec.rope.inverse_frequencies == pytest.approx(scaled)


def _unscaled(writer: GGUFWriter) -> None:
    for key in [key for key in writer.kv_data[0] if ".rope.scaling." in key]:
        del writer.kv_data[0][key]
