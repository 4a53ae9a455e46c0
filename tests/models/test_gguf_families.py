"""GGUF files of families other than Llama and Qwen, written by gguf-py with its names."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from tiny_gguf import SIZES, interleaved, write_tokens

from kvkeep import load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.errors import BadModelFile, InvalidArgument, UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.layers.delta_net import DELTA_NET_OUTPUT, output_columns
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.rope import rope_spec
from kvkeep.models.weights.checkpoint import decoder_tensors
from kvkeep.models.weights.export import export
from kvkeep.models.weights.packing import as_tensor
from kvkeep.models.weights.tensors import matrix_shapes

TOKENS = [(17 * i * i + 5 * i) % 250 for i in range(60)]
PADDING = {"pad_token_id": 0, "eos_token_id": 1}
DIVISORS = {
    "short_factor": [1 + 0.125 * pair for pair in range(12)],
    "long_factor": [2 + 1.5 * pair for pair in range(12)],
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 3.0,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **DIVISORS}
MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Kinds of layers come more than once, and the prompt is longer than the window.
NEAR = {"sliding_window": 20, "num_hidden_layers": 9}
ALIKE = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 20,
    "num_hidden_layers": 7,
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 259,
}
GEMMA3N = {
    "head_dim": 32,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 240,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.875, 0.95, 0.0, 0.0, 0.0, 0.0],
}
GEMMA4_ALONE = {
    **GEMMA4,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 4,
}
BESIDE = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 96,
}
LFM2 = {
    "num_hidden_layers": 6,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": False,
    **PADDING,
}
QWEN35 = {
    "head_dim": 32,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": True,
}
GRANITE4_H = {
    "num_hidden_layers": 6,
    "layer_types": [*["linear_attention"] * 2, "full_attention", *["linear_attention"] * 3],
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 3,
    "mamba_proj_bias": False,
    "pad_token_id": 0,
}
BAMBA = {
    "num_hidden_layers": 5,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    **PADDING,
}
STATE, WHOLE = "linear_attention", "full_attention"
NEMOTRON_H = {
    "num_hidden_layers": None,
    "layers_block_type": [STATE, "mlp", STATE, STATE, WHOLE, "mlp", WHOLE, "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 48,
    "n_groups": 2,
    "ssm_state_size": 32,
    **PADDING,
}
FALCON_H1 = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": 384,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "head_dim": 32,
    **PADDING,
}
FALCON_H1_MULTIPLIERS = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.6, 1.5],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 1.2, 0.8, 1.1, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_WHOLE = {  # transformers takes no other base than this one from a config of its version 4
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 128,
    },
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite": ("Granite", "granite", MULTIPLIERS),
    "granite-biases": ("Granite", "granite", MULTIPLIERS | {"attention_bias": True}),
    "olmo2": ("Olmo2", "olmo2", PADDING),
    "command-r": ("Cohere", "command-r", {"logit_scale": 0.25}),
    "glm4": ("Glm4", "glm4", PADDING | {"head_dim": 32, "attention_bias": False}),
    "glm4-biases": ("Glm4", "glm4", PADDING | {"head_dim": 32, "attention_bias": True}),
    "phi3": ("Phi3", "phi3", PADDING),
    "phi4-mini": (
        "Phi3",
        "phi3",
        PADDING | {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "ministral3": (
        "Ministral3",
        "mistral3",
        PADDING | {"head_dim": 32, "rope_parameters": MINISTRAL3},
    ),
    "mistral-small3": ("Mistral", "mistral3", {"head_dim": 32, "sliding_window": None}),
    "cohere2": ("Cohere2", "cohere2", NEAR | {"logit_scale": 0.25}),
    "exaone4": ("Exaone4", "exaone4", NEAR | {"head_dim": 32, "rope_parameters": LLAMA3}),
    "exaone4-alike": (
        "Exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "olmo3": ("Olmo3", "olmo2", NEAR | PADDING | {"rope_parameters": YARN_WHOLE}),
    "smollm3": ("SmolLM3", "smollm3", PADDING | {"num_hidden_layers": 9}),
    "gemma2": (
        "Gemma2",
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", "gemma3", GEMMA | {"rope_parameters": TWO_ROPES}),
    "gemma3n": ("Gemma3nText", "gemma3n", GEMMA3N | {"final_logit_softcapping": 3.0}),
    "gemma3n-widths": (
        "Gemma3nText",
        "gemma3n",
        GEMMA3N
        | {
            "intermediate_size": [512, 256, 128, 512, 64, 512, 512, 384, 32],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0] * 9,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("Gemma4Text", "gemma4", GEMMA4 | {"final_logit_softcapping": 3.0}),
    "gemma4-alone": ("Gemma4Text", "gemma4", GEMMA4_ALONE),
    "gemma4-experts": ("Gemma4Text", "gemma4", GEMMA4_ALONE | BESIDE),
    "lfm2": ("Lfm2", "lfm2", LFM2),
    "lfm2-untied": ("Lfm2", "lfm2", LFM2 | {"conv_L_cache": 2, "tie_word_embeddings": False}),
    "granite4-h": ("GraniteMoeHybrid", "granitehybrid", MULTIPLIERS | GRANITE4_H),
    "bamba": ("Bamba", "granitehybrid", BAMBA),
    "nemotron-h": ("NemotronH", "nemotron_h", NEMOTRON_H),
    "falcon-h1": ("FalconH1", "falcon-h1", FALCON_H1 | FALCON_H1_MULTIPLIERS),
    "falcon-h1-norms": (
        "FalconH1",
        "falcon-h1",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "qwen3.5": ("Qwen3_5Text", "qwen35", QWEN35),
    "qwen3.5-heads-alike": (
        "Qwen3_5Text",
        "qwen35",
        QWEN35 | {"linear_num_value_heads": 2, "tie_word_embeddings": False},
    ),
    "qwen3vl": ("Qwen3", "qwen3vl", {"head_dim": 32}),
    "qwen2vl": ("Qwen2", "qwen2vl", {}),
}
# Of which the kernels know nothing yet.
BY_TORCH = ["gemma3n", "gemma3n-widths"]
ROUTER_SCALES = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
# Of which a file has the exponentials of a checkpoint's numbers.
WITH_DECAYS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "falcon_h1")
WITH_DECAYS += ("bamba", "nemotron_h")
Edit = Callable[[GGUFWriter], None]


def random_model(kind: str) -> Any:
    """Return a random model whose weights are exact in bfloat16."""
    name, _, changes = MADE[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for each, weight in model.named_parameters():
            usual = weight[0].item() if each.endswith("norm.weight") else 0
            if name in ("Gemma3nText", "Gemma4Text") and each.endswith("q_norm.weight"):
                usual = 0.15  # products are not scaled
            routed = "modality_router" in each  # what it reads is divided by its width
            if re.search(r"norm_[12]\.weight|router\.(per_expert_)?scale", each):
                usual = 1
            weight.normal_(usual, 16 if routed else 0.15)
            weight.copy_(weight.bfloat16())
        for each, scale in model.named_buffers():
            if each.endswith("layer_scalar"):
                scale.uniform_(0.7, 1.3)
    return model


def frequencies(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    return np.array(rope_spec(rope, 1e4, head_dim, 512).inverse_frequencies)


def add_gemma4_fields(writer: GGUFWriter, config: Any) -> None:
    local = [kind == "sliding_attention" for kind in config.layer_types]
    each = [config.per_layer_config[layer] for layer in range(len(local))]
    first = len(local) - config.num_kv_shared_layers
    wide = [config.use_double_wide_mlp and layer >= first for layer in range(len(local))]
    writer.add_feed_forward_length([config.intermediate_size * (1 + each) for each in wide])
    writer.add_head_count_kv([layer.num_key_value_heads for layer in each])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(local)
    whole = each[local.index(False)].head_dim
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(config.head_dim)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    divisors = [1.0] * (whole // 8) + [1e30] * (whole // 2 - whole // 8)  # a quarter is rotated
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def add_lfm2_fields(writer: GGUFWriter, config: Any) -> None:
    kv_heads = config.num_key_value_heads
    writer.add_head_count_kv([0 if kind == "conv" else kv_heads for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def add_qwen35_fields(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    is_state = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_state)
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def tiled_value_heads(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Return a tensor of Gated DeltaNet with llama.cpp's order of value heads."""
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    key_rows = 2 * key_heads * config.linear_key_head_dim
    axis = 1 if ".out_proj." in name else 0
    if name.endswith("linear_attn.norm.weight"):
        return array
    first = key_rows if ".in_proj_qkv." in name or ".conv1d." in name else 0
    keys, values = np.split(array, [first], axis)
    tiles = np.array_split(values, heads, axis)
    order = [
        key * (heads // key_heads) + i
        for i in range(heads // key_heads)
        for key in range(key_heads)
    ]
    return np.concatenate([keys, *(tiles[head] for head in order)], axis)


def delta_net_tensors(
    name: str, array: np.ndarray, config: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of Qwen3.5 or Qwen3-Next as llama.cpp's converter changes it."""
    if ".linear_attn." not in name:
        yield name, array + 1 if name.endswith("norm.weight") else array
        return
    if ".conv1d." in name:
        array = array.squeeze(1)
    if config.model_type != "qwen3_next":
        array = tiled_value_heads(name, array, config)
    elif ".in_proj_qkvz." in name:
        keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads
        ratio //= keys
        value_rows = ratio * config.linear_value_head_dim
        ends = np.cumsum([config.linear_key_head_dim] * 2 + [value_rows])
        parts = np.split(array.reshape(keys, -1, array.shape[1]), ends, axis=1)
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate((q, k, v))
        yield name.replace("qkvz", "z"), z
        return
    if name.endswith(".A_log"):
        array = -np.exp(array)
    yield name.replace(".dt_bias", ".dt_proj.bias"), array


def add_granite4_h_fields(writer: GGUFWriter, config: Any) -> None:
    kv_heads = config.num_key_value_heads
    is_attention = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([kv_heads if flag else 0 for flag in is_attention])
    add_mamba_fields(writer, config, config.mamba_expand * config.hidden_size)
    is_bamba = config.model_type == "bamba"
    writer.add_rope_scaling_finetuned(is_bamba or config.position_embedding_type == "rope")
    if is_bamba:
        return
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def add_mamba_fields(writer: GGUFWriter, config: Any, inner_size: int) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(inner_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def add_nemotron_h_fields(writer: GGUFWriter, config: Any) -> None:
    kinds = config.layers_block_type
    kv_heads, has_experts = config.num_key_value_heads, writer.arch == "nemotron_h_moe"
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    writer.add_block_count(len(kinds))
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([kv_heads if kind == WHOLE else 0 for kind in kinds])
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if has_experts:
        shared_width = config.moe_shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(shared_width)
        writer.add_expert_shared_count(1)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if has_experts and config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


def with_multipliers(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Return a tensor of Falcon-H1 times the multipliers that its file contains."""
    gate, down = config.mlp_multipliers
    attention_input = config.attention_in_multiplier
    factors = {
        ".gate_proj.": gate,
        ".down_proj.": down,
        ".q_proj.": attention_input,
        ".k_proj.": attention_input * config.key_multiplier,
        ".v_proj.": attention_input,
        ".o_proj.": config.attention_out_multiplier,
        ".out_proj.": config.ssm_out_multiplier,
        "lm_head.": config.lm_head_multiplier,
        "embed_tokens.": config.embedding_multiplier,
    }
    factor = next((factor for part, factor in factors.items() if part in name), 1.0)
    if ".in_proj." in name:
        inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        widths = [inner, inner, keys, keys, config.mamba_n_heads]
        parts = np.repeat(config.ssm_multipliers, widths)
        return (array * parts[:, None] * config.ssm_in_multiplier).astype(np.float32)
    return array * np.float32(factor)


def mamba_tensors(name: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of a model with Mamba-2 as llama.cpp's converter changes it."""
    if name.endswith("shared_mlp.input_linear.weight"):
        prefix = name.split(".shared_mlp")[0]
        for module, part in zip(("gate", "up"), np.split(array, 2), strict=True):
            new_name = f"{prefix}.mlp.{module}_proj.weight"
            if config.num_local_experts:
                new_name = f"{prefix}.mlp.shared_expert.{module}_proj.weight"
            yield new_name, part
        return
    if name.endswith("shared_mlp.output_linear.weight"):
        place = "mlp.shared_expert" if config.num_local_experts else "mlp"
        yield name.replace("shared_mlp.output_linear", f"{place}.down_proj"), array
        return
    if ".conv1d.weight" in name:
        array = array.squeeze(1)
    if name.endswith(".A_log"):
        array = -np.exp(array)
    if name.endswith((".A_log", ".D")):
        array = array.reshape(-1, 1)
    is_nemotron = config.model_type == "nemotron_h"
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        array = array.reshape(config.n_groups if is_nemotron else config.mamba_n_groups, -1)
    if is_nemotron:
        name = name.replace("model.", "backbone.").replace("correction_bias", "correction.bias")
    yield name.replace(".dt_bias", ".dt.bias" if is_nemotron else ".dt_proj.bias"), array


def add_gemma3n_fields(writer: GGUFWriter, config: Any) -> None:
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def stacked_streams(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors with the matrices of AltUp's streams in GGUF's two stacks."""
    found, stacks = {}, {"altup_projections": [], "altup_unembed_projections": []}
    for name, tensor in model.state_dict().items():
        stack = next((each for each in stacks if f".{each}." in name), None)
        if stack:
            stacks[stack].append(tensor)
        else:
            found[name] = tensor
    stacks = {f"model.{name}.weight": each for name, each in stacks.items() if each}
    return found | {name: torch.stack(each) for name, each in stacks.items()}


def gguf_type(name: str, array: np.ndarray, stored: Type) -> Type:
    """Return llama.cpp's type: float32 for routers, vectors and rows of partial blocks."""
    whole = array.ndim > 1 and array.shape[-1] % 32 == 0  # which convolutions are not
    return stored if whole and not re.search(r"\.router\.|(mamba|mixer)\.norm", name) else Type.F32


def add_fields(writer: GGUFWriter, architecture: str, config: Any) -> None:
    """Add the metadata that llama.cpp's converter writes for the architecture."""
    if architecture.startswith("nemotron_h"):
        add_nemotron_h_fields(writer, config)
        return
    heads = config.num_attention_heads
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's are of local layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    if architecture not in ("gemma4", "qwen35moe"):
        writer.add_feed_forward_length(config.intermediate_size)
    if architecture not in ("gemma4", "lfm2", "lfm2moe", "granitehybrid"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if architecture in ("command-r", "cohere2"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    elif architecture not in ("lfm2", "lfm2moe"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if architecture != "gemma4":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "head_dim", None) and architecture != "gemma4":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "gemma4":
        add_gemma4_fields(writer, config)
    if architecture == "gemma3n":
        add_gemma3n_fields(writer, config)
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        add_qwen35_fields(writer, config)
    if architecture in ("lfm2", "lfm2moe"):
        add_lfm2_fields(writer, config)
    if architecture == "granitehybrid":
        add_granite4_h_fields(writer, config)
    if architecture == "falcon-h1":
        add_mamba_fields(writer, config, config.mamba_d_ssm)
    if config.model_type == "granite" or (
        config.model_type == "granitemoehybrid" and not config.num_local_experts
    ):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("exaone4", "olmo2") and hasattr(config, "layer_types"):
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
    if architecture == "gemma4":
        writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    if architecture in ("gemma2", "gemma3"):
        if config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "yarn" and "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        divisors = 1 / (frequencies(rope, head_dim) / frequencies({}, head_dim))
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for kind in ("long", "short"):
            divisors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", divisors)


def add_tensor(
    writer: GGUFWriter, names: gguf.TensorNameMap, name: str, array: np.ndarray, stored: Type
) -> None:
    form = gguf_type(name, array, stored)
    if name.endswith(("layer_scalar", "correct_output_scale")) or ".experts." in name:
        name += ".weight"
    there = names.get_name(name, try_suffixes=(".weight", ".bias"))
    for scale, of in ROUTER_SCALES.items():  # as llama.cpp's converter has them
        if name.endswith(scale):
            there = f"blk.{name.split('.')[2]}.{of}.scale"
    assert there is not None, name
    if there.endswith(".ffn_norm.weight") and writer.arch == "falcon-h1":
        there = there.removesuffix(".weight")
    writer.add_tensor(there, gguf.quantize(array, form), raw_dtype=form)


def write(
    path: Path, kind: str, model: Any, stored: Type = Type.F32, edit: Edit = lambda writer: None
) -> Path:
    _, architecture, _ = MADE[kind]
    config = model.config
    writer = GGUFWriter(path, architecture)
    add_fields(writer, architecture, config)
    write_tokens(writer)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in stacked_streams(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        for part, heads in (
            (".q_proj.", config.num_attention_heads),
            (".k_proj.", config.num_key_value_heads),
        ):
            if architecture in ("granite", "mistral3", "smollm3", "granitehybrid") and part in name:
                array = interleaved(array, heads)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        if ".conv.conv." in name:
            array = array.squeeze(1)
        if architecture == "falcon-h1":
            array = with_multipliers(name, array, config)
        if architecture == "qwen35":
            ((name, array),) = delta_net_tensors(name, array, config)
        parts = [(name, array)]
        if ".mamba." in name or ".shared_mlp." in name or architecture == "nemotron_h":
            parts = list(mamba_tensors(name, array, config))
        for part_name, part_array in parts:
            add_tensor(writer, names, part_name, part_array, stored)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", MADE)
def test_converted_folder_equals_the_original_model(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    convert(write(tmp_path / "m.gguf", kind, model), tmp_path / "own", False)
    export(tmp_path / "own", tmp_path / "out", torch.float32)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert type(loaded) is type(model)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
        found = loaded.eval()(torch.tensor([TOKENS])).logits[0]
    most = 1e-4 if model.config.model_type in WITH_DECAYS else 1e-6
    assert (found - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("kind", MADE)
def test_logits_equal_the_original_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    model = random_model(kind)
    path = write(tmp_path / "m.gguf", kind, model)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    session, found = load_model(str(path), dtype="float32").session(policy="full"), []
    session.feed(TOKENS[:40])
    found.append(session.logits)
    for token in TOKENS[40:]:
        session.feed([token])
        found.append(session.logits)
    assert (torch.stack(found) - expected[39:]).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("stored", [Type.Q4_0, Type.Q8_0])
@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "falcon-h1"])
def test_fused_matrices_are_split_and_reordered_when_packed(
    kind: str, stored: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one each by itself, and rows in the order in which they are rotated.

    Where there are no kernels for them they are unpacked, and rounded to bfloat16.
    """
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    reference = random_model(kind)
    model = load_model(str(write(tmp_path / "m.gguf", kind, reference, stored)))
    compiled = kernel_library() is not None and kind not in BY_TORCH
    assert isinstance(model.decoder.executor, CompiledExecutor) == compiled
    values = {}
    for name, tensor in reference.state_dict().items():
        if tensor.dim() > 1:
            form = gguf_type(name, tensor.numpy(), stored)
            read = gguf.dequantize(gguf.quantize(tensor.numpy(), form), form)
            values[name] = torch.from_numpy(read)
    wanted = decoder_tensors(model.spec, values)
    assert model.decoder.packed.keys() <= wanted.keys()
    held = model.decoder.packed if compiled else model.decoder.tensors
    rounded = torch.float32 if compiled else torch.bfloat16
    for name in matrix_shapes(model.spec):
        if name in held:  # a head that is the embedding has no other name
            found = as_tensor(held[name], torch.float32)
            if name.endswith(DELTA_NET_OUTPUT):
                found = output_columns(model.spec.states, found)
            assert torch.equal(found, wanted[name].to(rounded).float()), name
    session = model.session(policy="full")
    session.feed(TOKENS[:20])
    assert len([session.next_token() for _ in range(3)]) == 3


@pytest.mark.parametrize(
    ("kind", "edit", "why"),
    [
        ("glm4", lambda writer: writer.add_rope_dimension_sections([4, 2, 2, 0]), "GLM-4V"),
        ("granite", lambda writer: writer.add_rope_scaling_finetuned(False), "without RoPE"),
    ],
)
def test_unsupported_variant_of_a_family_is_refused(
    kind: str, edit: Edit, why: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", kind, random_model(kind), edit=edit)
    with pytest.raises(UnsupportedModel, match=why):
        convert(path, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["qwen35.block_count"]
        writer.add_block_count(7)
        writer.add_nextn_predict_layers(1)
        for name in ("attn_norm", "attn_q", "nextn.eh_proj"):
            writer.add_tensor(f"blk.6.{name}.weight", np.ones((32, 32), np.float32))

    convert(
        write(tmp_path / "m.gguf", "qwen3.5", random_model("qwen3.5"), edit=edit),
        tmp_path / "out",
        False,
    )
    spec = read_spec(tmp_path / "out")
    assert spec.layers == 6
    assert spec.states is not None
    assert spec.states.layers == (0, 1, 3, 4)


def per_layer_count(writer: GGUFWriter, each: list[int]) -> None:
    del writer.kv_data[0][gguf.Keys.Attention.HEAD_COUNT_KV.format(arch="granite")]
    writer.add_head_count_kv(each)


@pytest.mark.parametrize(
    ("each", "found"),
    [([2, 2], None), ([2, 0], UnsupportedModel), ([0, 0], BadModelFile)],
    ids=str,
)
def test_kv_heads_may_be_stated_per_layer_if_equal(
    each: list[int], found: type[Exception] | None, tmp_path: Path
) -> None:
    model = random_model("granite")
    edit = partial(per_layer_count, each=each)
    path = write(tmp_path / "m.gguf", "granite", model, edit=edit)
    if found is None:
        convert(path, tmp_path / "out", False)
        assert read_spec(tmp_path / "out").kv_heads == 2
    else:
        with pytest.raises(found, match="head_count_kv"):
            convert(path, tmp_path / "out", False)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("jamba", "Mamba"),
        ("deepseek2", "multi-head latent attention"),
        ("glm4moe", "routes to experts by biased scores"),
    ],
)
def test_unsupported_architecture_is_refused_with_an_alternative(
    architecture: str, why: str, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=rf"{architecture}.* it .*{why}.* supported;"):
        convert(tmp_path / "m.gguf", tmp_path / "out", False)


def test_longrope_length_is_that_of_the_short_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    path = write(tmp_path / "m.gguf", "phi4-mini", random_model("phi4-mini"))
    model = load_model(str(path), dtype="float32")
    assert model.spec.max_positions == 128
    assert model.session().max_kv_size == 128
    with pytest.raises(InvalidArgument, match=r"1 to 128.*longrope.*frequencies.*self_extend"):
        model.session(max_kv_size=129)
