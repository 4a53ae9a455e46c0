"""Families that differ from Llama: the compiled decode step against torch and float32."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compiled.test_decoding import SETTINGS, by_torch_of, forked, last, logits_of
from packed_model import packed_model, routed_by_tokens, spec_of
from sanitizers import SANITIZED
from small_models import small_tokenizer

from kvkeep import SessionGroup, load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.models.weights.packing import MatrixBits
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

KINDS = [("granite", 64), ("olmo2", 96), ("glm4", 32), ("phi4", 128), ("cohere", 64)]
KINDS += [("gemma4", 64), ("gemma4-alone", 512)]
KINDS += [("gemma2", 128), ("gemma3", 256), ("cohere2", 64), ("smollm3", 96)]
KINDS += [("smollm3-yarn", 64), ("qwen3.5", 256)]
MIXTURES = [
    ("mixtral", 64),
    ("qwen2-moe", 32),
    ("qwen3-moe", 128),
    ("olmoe", 96),
    ("granite-moe", 64),
    ("gpt-oss", 64),
    ("gemma4-experts", 128),
    ("lfm2-moe", 64),
    ("granite4-moe", 128),
    ("gated-sigmoid", 32),
]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 480,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + 0.05 * pair for pair in range(24)],
    "long_factor": [3 + 1.0 * pair for pair in range(24)],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.6,
}
LOCAL = {"sliding_window": 20, "num_hidden_layers": 5}
_LOCAL, _WHOLE = "sliding_attention", "full_attention"
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": [_LOCAL, _LOCAL, _WHOLE] * 3,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "final_logit_softcapping": 30.0,
}
GEMMA4_ALONE = {
    **GEMMA4,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "glm": ("Glm", {"head_dim": 64}),
    "glm4": ("Glm4", {"head_dim": 64, "attention_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 20, "num_hidden_layers": 5}),
    "gemma2": ("Gemma2", LOCAL | {"head_dim": 128, "attn_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3Text", LOCAL | {"head_dim": 256, "sliding_window_pattern": 3}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-alone": ("Gemma4Text", GEMMA4_ALONE | {"head_dim": 256, "global_head_dim": 512}),
    "exaone4": ("Exaone4", LOCAL | {"sliding_window_pattern": 4}),
    "olmo3": ("Olmo3", LOCAL),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-yarn": ("SmolLM3", {"no_rope_layer_interval": 2, "rope_parameters": YARN}),
    "exaone4-yarn": ("Exaone4", LOCAL | {"sliding_window_pattern": 4, "rope_parameters": YARN}),
    "phi4-mini": ("Phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
}
EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
MADE_OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 160}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 224}),
    "qwen3-moe": (
        "Qwen3Moe",
        EXPERTS | {"norm_topk_prob": True, "head_dim": 128, "decoder_sparse_step": 2},
    ),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 6, **MADE["granite"][1]}),
    "gpt-oss": (
        "GptOss",
        {
            **LOCAL,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
MADE_OF_EXPERTS["gemma4-experts"] = (
    "Gemma4Text",
    GEMMA4_ALONE
    | {
        "enable_moe_block": True,
        "num_experts": 11,
        "top_k_experts": 3,
        "moe_intermediate_size": 96,
    },
)
MADE |= MADE_OF_EXPERTS
# Each family with two of three settings, by turns: one for each width of its weights.
# `compiled/test_decoding.py` has all settings.
BY_TURNS = [SETTINGS[2]] if SANITIZED else [SETTINGS[0], SETTINGS[2], SETTINGS[4]]
WIDTHS: tuple[MatrixBits | None, ...] = (None, 4)
CASES = [  # the other width before releases
    pytest.param(
        *family,
        bits,
        BY_TURNS[(number + turn) % len(BY_TURNS)],
        marks=() if number % 2 == turn else pytest.mark.slow,
    )
    for number, family in enumerate(KINDS + MIXTURES)
    for turn, bits in enumerate(WIDTHS)
]
TOKENS = [(17 * i * i + 5 * i) % 256 for i in range(90)]


@pytest.mark.parametrize(("family", "head_dim", "bits", "settings"), CASES, ids=str)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    family: str, head_dim: int, bits: MatrixBits | None, settings: dict[str, object]
) -> None:
    model = packed_model(spec_of(head_dim, family), bits)
    assert isinstance(model.decoder.executor, CompiledExecutor)
    exact, rounded = by_torch_of(head_dim, family, bits, settings)
    reference = (rounded - exact).square().mean()
    compiled = (logits_of(model, settings) - exact).square().mean()
    assert exact.abs().max() > 2
    assert compiled <= 1.2 * reference


@pytest.mark.parametrize(("family", "head_dim"), KINDS + MIXTURES)
def test_a_group_gives_the_same_bits_as_each_session_alone(family: str, head_dim: int) -> None:
    model = packed_model(spec_of(head_dim, family), 4)

    def made() -> list[Session]:
        session = model.session(max_kv_size=100)
        session.feed([i % 250 + 1 for i in range(130)])
        return forked(session, 5)

    together, alone = made(), made()
    group = SessionGroup(together)
    for _ in range(4):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(last(one), last(other))


def written(folder: Path, kind: str) -> Path:
    """Write a random bfloat16 checkpoint with a tokenizer, of sizes that the kernels support."""
    name, changes = MADE[kind]
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    torch.manual_seed(3)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).to(
        torch.bfloat16
    )
    with torch.no_grad():
        for each, weight in model.named_parameters():
            is_near_one = re.search(r"norm(_[12])?\.weight|router\.(per_expert_)?scale", each)
            weight.normal_(1 if is_near_one else 0, 0.1)
            if name == "Gemma4Text" and "q_norm" in each:
                weight.mul_(0.3)  # products are not scaled
        for each, scale in model.named_buffers():
            if each.endswith("layer_scalar"):
                scale.uniform_(0.7, 1.3)
        if kind in MADE_OF_EXPERTS:
            routed_by_tokens(model.state_dict(), 0.1)
    model.save_pretrained(folder)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", MADE)
def test_a_checkpoint_decodes_as_near_to_float32_as_transformers_in_bfloat16(
    kind: str, tmp_path: Path
) -> None:
    model = load_model(str(written(tmp_path / kind, kind)))
    assert isinstance(model.decoder.executor, CompiledExecutor)
    session, results = model.session(policy="full"), []
    for token in TOKENS:
        session.feed([token])
        results.append(last(session))
    theirs = []
    for dtype in (torch.float32, torch.bfloat16):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=dtype)
        with torch.no_grad():
            theirs.append(loaded.eval()(torch.tensor([TOKENS])).logits[0].float())
    exact, rounded = theirs
    error = (torch.stack(results) - exact).square().mean().sqrt()
    assert error <= 1.1 * (rounded - exact).square().mean().sqrt()


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_packed_rows_are_in_the_order_of_rotation(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    folder = written(tmp_path / "glm4", "glm4")
    model = load_model(str(folder), weights=weights)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        tensor = model.decoder.tensors[f"model.layers.1.{name}.weight"].float()
        read = model.decoder.packed[f"model.layers.1.{name}.weight"].unpack().values()
        assert (read - tensor).abs().max() <= (0.08 if weights == "int4" else 0.008)
