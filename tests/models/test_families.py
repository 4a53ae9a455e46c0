"""Each family's logits equal transformers', on checkpoints that transformers wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference import streaming_logits
from topics import topic_ids

from kvkeep.model import Model
from kvkeep.models.checkpoint import decoder_shapes, decoder_tensors
from kvkeep.models.config import read_spec
from kvkeep.models.export import export
from kvkeep.models.llama import Decoder
from kvkeep.models.text import TextCodec
from kvkeep.models.weights import check_tensors, read_shapes, read_tensors

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MINISTRAL3 = {
    "head_dim": 16,
    "pad_token_id": 0,
    "rope_parameters": YARN
    | {
        "original_max_position_embeddings": 160,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 0.7,
}
GRANITE4 = {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "position_embedding_type": "rope",
    "mamba_n_heads": 12,
}
PADDING = {"pad_token_id": 0, "eos_token_id": 1}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED = {"shared_expert_intermediate_size": 56}
GLM = {"head_dim": 16, "attention_bias": False, "pad_token_id": 0, "eos_token_id": 1}


def longrope(pairs: int, **changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2 + 3.0 * pair for pair in range(pairs)],
        **changes,
    }


PHI4_MINI = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "original_max_position_embeddings": 160,
    "rope_parameters": longrope(6, partial_rotary_factor=0.75),
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", MINISTRAL3),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "phi3": ("Phi3", {"pad_token_id": 0, "eos_token_id": 1}),
    "phi3-tied": ("Phi3", {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}),
    "phi4-mini": ("Phi3", PHI4_MINI),
    "phi3-128k": ("Phi3", PHI4_MINI | {"rope_parameters": longrope(8)}),
    "granite": ("Granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite-tied": ("Granite", GRANITE | {"tie_word_embeddings": True}),
    "granite4-dense": ("GraniteMoeHybrid", GRANITE | GRANITE4),
    "olmo2": ("Olmo2", {"pad_token_id": 0, "eos_token_id": 1}),
    "olmo2-one-kv-head": ("Olmo2", {"num_key_value_heads": 1, "pad_token_id": 0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-biases": (
        "Cohere",
        {"logit_scale": 0.25, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "glm": ("Glm", GLM),
    "glm-biases": ("Glm", GLM | {"attention_bias": True}),
    "glm4": ("Glm4", GLM | {"attention_bias": True}),
    "glm4-quarter": ("Glm4", GLM | {"partial_rotary_factor": 0.25}),
    "glm4-whole": ("Glm4", GLM | {"partial_rotary_factor": 1.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-one-of-all": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 24}),
    "qwen3-moe-shares": ("Qwen3Moe", EXPERTS | {"num_experts_per_tok": 7}),
    "qwen3-moe-alternating": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3-moe-dense-first": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | SHARED),
    "qwen2-moe-normed": ("Qwen2Moe", EXPERTS | SHARED | {"norm_topk_prob": True}),
    "qwen2-moe-no-biases": ("Qwen2Moe", EXPERTS | SHARED | {"qkv_bias": False}),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, **PADDING}),
    "granite-moe": ("GraniteMoe", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
}
BEYOND_LLAMA = ["granite", "granite4-dense", "olmo2", "glm", "glm4", "phi4-mini", "cohere"]
MIXTURES = ["mixtral", "qwen3-moe-alternating", "qwen2-moe", "olmoe", "granite-moe"]
TOKENS = [(17 * i * i + 5 * i) % 320 for i in range(150)]


def written(folder: Path, family: str) -> transformers.PreTrainedModel:
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1 if name.endswith("norm.weight") else 0, 0.15)
    model.save_pretrained(folder)
    return model


def opened(folder: Path, text: TextCodec) -> Model:
    spec = read_spec(folder)
    check_tensors(spec, decoder_shapes(spec, read_shapes(folder)), folder)
    whole = read_tensors(folder, torch.float32, torch.device("cpu"), progress=False)
    tensors = decoder_tensors(spec, whole)
    return Model("small", folder, Decoder(spec, tensors), text)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, smollm2_folder: Path, family: str) -> None:
    theirs = written(tmp_path, family)
    ours = opened(tmp_path, TextCodec.open(smollm2_folder))
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1  # not a flat distribution, which anything would match

    most = 1e-4 * min(1, expected.abs().max())
    whole = ours.session(policy="full")
    whole.feed(TOKENS)
    assert (whole.logits - expected[-1]).abs().max() <= most

    for cut in (1, 7):
        stepwise = ours.session(policy="full")
        found = []
        for first in range(0, len(TOKENS), cut):
            stepwise.feed(TOKENS[first : first + cut])
            found.append(stepwise.logits)
        ends = [*range(cut - 1, len(TOKENS), cut)]
        ends += [len(TOKENS) - 1] * (len(found) - len(ends))
        assert (torch.stack(found) - expected[ends]).abs().max() <= most


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_stacks_are_those_that_lie_apart(
    tmp_path: Path, smollm2_folder: Path, family: str
) -> None:
    """transformers writes the stacks that it has in memory where it is told to."""
    text = TextCodec.open(smollm2_folder)
    written(tmp_path / "apart", family).save_pretrained(
        tmp_path / "stacks", save_original_format=False
    )
    stacks = [name for name in read_shapes(tmp_path / "stacks") if name.endswith("gate_up_proj")]
    assert stacks
    found = []
    for folder in ("apart", "stacks"):
        session = opened(tmp_path / folder, text).session(policy="full")
        session.feed(TOKENS)
        found.append(session.logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("family", [*BEYOND_LLAMA, *MIXTURES])
def test_bounded_logits_equal_the_naive_reference(
    tmp_path: Path, smollm2_folder: Path, family: str
) -> None:
    written(tmp_path, family)
    ours = opened(tmp_path, TextCodec.open(smollm2_folder))
    expected = streaming_logits(ours.decoder, TOKENS, max_kv_size=48, keep=4, last=4)
    for prefill_step in (1, 7, 512):
        session = ours.session(48, 4, prefill_step=prefill_step)
        session.feed(TOKENS[:-3])
        found = [session.logits]
        for token in TOKENS[-3:]:
            session.feed([token])
            found.append(session.logits)
        assert session.cache.cells == 48
        assert (torch.stack(found) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_converted_model_equals_transformers_on_the_same_weights(
    smollm2_folder: Path, smollm2_fp32: Model, tmp_path: Path
) -> None:
    export(smollm2_folder, tmp_path / "out", torch.float32)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = topic_ids(smollm2_fp32)[:300]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, -3:]
    session = smollm2_fp32.session(policy="full", prefill_step=128)
    session.feed(tokens[:-2])
    found = [session.logits]
    for token in tokens[-2:]:
        session.feed([token])
        found.append(session.logits)
    assert (torch.stack(found) - expected).abs().max() <= 1e-3  # logits reach 40
