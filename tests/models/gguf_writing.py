"""Writes a random model as a GGUF file by gguf-py, with the names and layout of llama.cpp."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_kinds import MADE
from models.gguf_states import (
    add_granite4_h_fields,
    add_lfm2_fields,
    add_mamba_fields,
    add_nemotron_h_fields,
    add_qwen35_fields,
    delta_net_tensors,
    mamba_tensors,
    with_multipliers,
)
from tiny_gguf import interleaved, write_tokens

from kvkeep.models.spec.rope import rope_spec

ROUTER_SCALES = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
Edit = Callable[[GGUFWriter], None]


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
