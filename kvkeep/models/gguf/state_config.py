"""Config fields of models with state layers."""

from typing import Any

from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.nemotron_config import NEMOTRON_ARCHS, kv_heads_per_layer, nemotron_config
from kvkeep.models.spec.config_states import TILED_OUTPUT_FIELD

# 0 for a layer without attention.
KV_HEADS_PER_LAYER_ARCHS = ("lfm2", "lfm2moe", "granitehybrid", *NEMOTRON_ARCHS)
_DELTA_NET_ARCHS = ("qwen35", "qwen35moe", "qwen3next")
# Every Granite states one of these; a Bamba has the same architecture name and none.
_GRANITE_KEYS = ("{arch}.attention.scale", "{arch}.embedding_scale", "{arch}.logit_scale")
# Files of these may have layers more, which predict several tokens and are not needed.
MTP_ARCHS = (*_DELTA_NET_ARCHS, *NEMOTRON_ARCHS)


def state_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of state layers; empty without them. Raises UnsupportedModel."""
    if file.arch in ("lfm2", "lfm2moe"):
        return _lfm2_config(file)
    if file.arch in _DELTA_NET_ARCHS:
        return _delta_net_config(file)
    if file.arch == "granitehybrid":
        return _granite_config(file)
    if file.arch == "falcon-h1":
        return _falcon_h1_config(file)
    if file.arch in NEMOTRON_ARCHS:
        return nemotron_config(file)
    return {}


def _lfm2_config(file: GgufFile) -> dict[str, Any]:
    if file.non_negative_int("{arch}.attention.sliding_window", 0):
        raise file.unsupported_error("has local layers (attention.sliding_window)")
    kv_heads = kv_heads_per_layer(file)
    first_state_layer = kv_heads.index(0) if 0 in kv_heads else 0
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": file.positive_int("{arch}.shortconv.l_cache"),
        "conv_bias": f"blk.{first_state_layer}.shortconv.conv.bias" in file.tensors,
        "block_auto_adjust_ff_dim": False,  # the file states the width as it is
    }


def _granite_config(file: GgufFile) -> dict[str, Any]:
    kv_heads = kv_heads_per_layer(file)
    inner_size, hidden_size = (
        file.positive_int(key) for key in ("{arch}.ssm.inner_size", "{arch}.embedding_length")
    )
    if inner_size % hidden_size:
        expected = f"a multiple of {hidden_size} (embedding_length)"
        raise file.invalid_error("{arch}.ssm.inner_size", expected)
    first = kv_heads.index(0) if 0 in kv_heads else 0
    is_rotated = file.boolean("{arch}.rope.scaling.finetuned", True)
    layer_fields: dict[str, Any] = {
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in kv_heads],
        "position_embedding_type": "rope" if is_rotated else None,
    }
    if is_bamba(file):
        indices = [layer for layer, heads in enumerate(kv_heads) if heads]
        layer_fields = {"attn_layer_indices": indices}
    return {
        "num_key_value_heads": max(kv_heads),
        **layer_fields,
        "mamba_expand": inner_size // hidden_size,
        **_mamba_config(file, first),
    }


def is_bamba(file: GgufFile) -> bool:
    """Whether a file with Granite 4-H's architecture name is a Bamba."""
    return file.arch == "granitehybrid" and not any(map(file.has, _GRANITE_KEYS))


def _falcon_h1_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of Falcon-H1. All its multipliers are 1: its weights contain them."""
    has_bias = "blk.0.ssm_in.bias" in file.tensors
    return {
        **_mamba_config(file, 0),
        "mamba_d_ssm": file.positive_int("{arch}.ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": has_bias,
    }


def _mamba_config(file: GgufFile, layer: int) -> dict[str, Any]:
    """Return the fields of Mamba-2. layer: one that has it."""
    return {
        "mamba_n_heads": file.positive_int("{arch}.ssm.time_step_rank"),
        "mamba_d_head": "auto",
        "mamba_n_groups": file.positive_int("{arch}.ssm.group_count"),
        "mamba_d_state": file.positive_int("{arch}.ssm.state_size"),
        "mamba_d_conv": file.positive_int("{arch}.ssm.conv_kernel"),
        "mamba_conv_bias": f"blk.{layer}.ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": f"blk.{layer}.ssm_in.bias" in file.tensors,
    }


def _delta_net_config(file: GgufFile) -> dict[str, Any]:
    key_heads = file.positive_int("{arch}.ssm.group_count")
    value_heads = file.positive_int("{arch}.ssm.time_step_rank")
    value_width = file.positive_int("{arch}.ssm.inner_size")
    if value_width % value_heads:
        expected = f"a multiple of {value_heads} (ssm.time_step_rank)"
        raise file.invalid_error("{arch}.ssm.inner_size", expected)
    if not _rotates_by_text_position(file):
        feature = "rotates part of each head by image positions (rope.dimension_sections)"
        raise file.unsupported_error(feature)
    return {
        "layer_types": _delta_net_layer_types(file),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": file.positive_int("{arch}.ssm.state_size"),
        "linear_value_head_dim": value_width // value_heads,
        "linear_conv_kernel_dim": file.positive_int("{arch}.ssm.conv_kernel"),
        TILED_OUTPUT_FIELD: key_heads != value_heads and file.arch != "qwen3next",
    }


def _delta_net_layer_types(file: GgufFile) -> list[str]:
    """Return each layer's type: as stated, or with attention in every n-th layer."""
    num_layers, key = file.layer_count(), "{arch}.attention.recurrent_layers"
    if not file.has(key):
        interval = file.positive_int("{arch}.full_attention_interval", 4)
        is_state = [(layer + 1) % interval > 0 for layer in range(num_layers)]
    else:
        flags = file.value(key)
        if (
            not isinstance(flags, list)
            or len(flags) < num_layers
            or any(flag not in (0, 1) for flag in flags)
        ):
            raise file.invalid_error(key, f"true or false for each of {num_layers} layers")
        is_state = [bool(flag) for flag in flags[:num_layers]]
    return ["linear_attention" if flag else "full_attention" for flag in is_state]


def _rotates_by_text_position(file: GgufFile) -> bool:
    """Whether all rotated pairs are in sections of the three positions that text has alike.

    Sections interleave: pair i rotates by position i % 3, if its section has room for it.
    """
    key = "{arch}.rope.dimension_sections"
    if not file.has(key):
        return True
    sections = [*file.integers(key), 0, 0, 0, 0][:4]
    total, pairs = sum(sections), file.positive_int("{arch}.rope.dimension_count") // 2
    if min(sections) < 0 or not total:
        raise file.invalid_error(key, "four numbers of pairs")
    return all(pair < 3 * sections[pair % 3] for pair in range(min(pairs, total)))
