"""Fields and tensors in a GGUF file of layers with a state: delta nets, Mamba, convolutions."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGUFWriter
from models.gguf_kinds import WHOLE


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
