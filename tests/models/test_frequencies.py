"""RoPE frequency tables, against those of transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvkeep.errors import BadModelFile
from kvkeep.models.spec.rope import rope_spec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        {**LLAMA3, "factor": 32.0},
        {**LLAMA3, "original_max_position_embeddings": None},
        YARN,
        {**YARN, "factor": 1.0},
        {**YARN, "truncate": False},
        {**YARN, "beta_fast": 20, "beta_slow": 2},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        {**YARN, "mscale": 0.7},
        {**YARN, "original_max_position_embeddings": None},
    ],
    ids=str,
)
def test_tables_equal_transformers(settings: dict[str, Any], head_dim: int, theta: float) -> None:
    stated = {key: value for key, value in settings.items() if value is not None}
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=16384,
        rope_parameters={"rope_theta": theta, **stated},
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, torch.device("cpu"))
    rope = rope_spec(settings, theta, head_dim, 16384)
    assert rope.kind == stated["rope_type"]
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)
    torch.testing.assert_close(
        torch.tensor(rope.inverse_frequencies), expected, rtol=2e-6, atol=0.0
    )


@pytest.mark.parametrize("factor", [{}, {"factor": 8.0}, {"attention_factor": 1.5}], ids=str)
@pytest.mark.parametrize("longest", [4096, 131_072])
def test_longrope_uses_the_short_table(longest: int, factor: dict[str, float]) -> None:
    settings: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.07 * pair for pair in range(24)],
        "long_factor": [2 + 1.3 * pair for pair in range(24)],
        "original_max_position_embeddings": 4096,
        **factor,
    }
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75, **settings},
    )
    expected, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=4096)
    rope = rope_spec(settings, 1e4, 48, longest)
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)
    torch.testing.assert_close(
        torch.tensor(rope.inverse_frequencies), expected, rtol=2e-6, atol=0.0
    )


@pytest.mark.parametrize("short", [None, [], [1.0] * 3, [1.0, 1.0, 0.0, 1.0], [1.0, "2", 1.0, 1.0]])
def test_longrope_without_a_short_table_is_refused(short: Any) -> None:
    settings = {"rope_type": "longrope", "short_factor": short}
    with pytest.raises(BadModelFile, match="short_factor"):
        rope_spec(settings, 10_000.0, 8, 2048)


def test_unscaled_table_is_a_geometric_series() -> None:
    rope = rope_spec({}, 10_000.0, 8, 2048)
    assert rope.kind == "default"
    assert rope.inverse_frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001), rel=1e-15)
    assert rope.attention_scaling == 1.0


@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize("factor", [None, 0, -2.0, "8", True])
def test_scaling_without_a_valid_factor_is_refused(kind: str, factor: Any) -> None:
    with pytest.raises(BadModelFile, match="factor"):
        rope_spec({**LLAMA3, "rope_type": kind, "factor": factor}, 10_000.0, 8, 2048)
