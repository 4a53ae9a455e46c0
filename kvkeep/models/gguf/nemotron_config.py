"""Config fields of Nemotron-H, and numbers that a file states for each layer."""

from typing import Any

from kvkeep.models.gguf.file import GgufFile

NEMOTRON_ARCHS = ("nemotron_h", "nemotron_h_moe")
_KV_HEADS_KEY = "{arch}.attention.head_count_kv"
_MLP_WIDTHS_KEY = "{arch}.feed_forward_length"


def nemotron_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of Nemotron-H. Raises UnsupportedModel, BadModelFile."""
    kv_heads, mlp_widths = kv_heads_per_layer(file), numbers_per_layer(file, _MLP_WIDTHS_KEY)
    kinds = []
    for layer, (heads, width) in enumerate(zip(kv_heads, mlp_widths, strict=True)):
        mlp_kind = "moe" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "mlp"
        kinds.append("full_attention" if heads else mlp_kind if width else "linear_attention")
    heads, inner_size = (
        file.positive_int(f"{{arch}}.ssm.{name}") for name in ("time_step_rank", "inner_size")
    )
    if inner_size % heads:
        expected = f"a multiple of {heads} (ssm.time_step_rank)"
        raise file.invalid_error("{arch}.ssm.inner_size", expected)
    first_state = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    first_mlp = kinds.index("mlp") if "mlp" in kinds else 0
    dense_widths = {width for kind, width in zip(kinds, mlp_widths, strict=True) if kind == "mlp"}
    if len(dense_widths) > 1:
        raise file.unsupported_error("has MLPs of different widths (feed_forward_length)")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(kv_heads),
        "intermediate_size": max(mlp_widths) or 1,
        "mlp_hidden_act": "relu2",
        "mlp_bias": f"blk.{first_mlp}.ffn_up.bias" in file.tensors,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner_size // heads,
        "n_groups": file.positive_int("{arch}.ssm.group_count"),
        "ssm_state_size": file.positive_int("{arch}.ssm.state_size"),
        "conv_kernel": file.positive_int("{arch}.ssm.conv_kernel"),
        "use_conv_bias": f"blk.{first_state}.ssm_conv1d.bias" in file.tensors,
        "use_bias": f"blk.{first_state}.ssm_in.bias" in file.tensors,
        **(_experts_config(file) if "moe" in kinds else {}),
    }


def _experts_config(file: GgufFile) -> dict[str, Any]:
    scale = file.rounded_number("{arch}.expert_weights_scale", 1.0)
    return {
        "n_routed_experts": file.positive_int("{arch}.expert_count"),
        "num_experts_per_tok": file.uniform_int("{arch}.expert_used_count"),
        "moe_intermediate_size": file.uniform_int("{arch}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": file.positive_int(
            "{arch}.expert_shared_feed_forward_length"
        ),
        "moe_latent_size": file.non_negative_int("{arch}.moe_latent_size", 0) or None,
        "norm_topk_prob": file.boolean("{arch}.expert_weights_norm", False),
        "routed_scaling_factor": scale or 1.0,  # 0 stands for 1
        "n_group": max(1, file.non_negative_int("{arch}.expert_group_count", 1)),
    }


def kv_heads_per_layer(file: GgufFile) -> list[int]:
    """Return the KV heads of each layer: 0, or the same number."""
    num_layers = file.layer_count()
    if not isinstance(file.value(_KV_HEADS_KEY), list):
        return [file.positive_int(_KV_HEADS_KEY)] * num_layers
    kv_heads = numbers_per_layer(file, _KV_HEADS_KEY)
    if max(kv_heads) == 0:
        raise file.invalid_error(_KV_HEADS_KEY, "at least 1 for one of the layers")
    if len(set(kv_heads) - {0}) > 1:
        raise file.unsupported_error(f"has different KV heads in its layers ({kv_heads})")
    return kv_heads


def numbers_per_layer(file: GgufFile, key: str) -> list[int]:
    """Return a number of at least 0 for each layer, stated once or as a list.

    Lists also have numbers of layers that predict several tokens, at the end.
    """
    num_layers, value = file.layer_count(), file.value(key)
    if not isinstance(value, list):
        return [file.non_negative_int(key)] * num_layers
    numbers, stated = file.integers(key), num_layers + file.predicting_layer_count()
    if len(numbers) != stated or min(numbers) < 0:
        raise file.invalid_error(key, f"a whole number for each of {stated} layers")
    return numbers[:num_layers]
