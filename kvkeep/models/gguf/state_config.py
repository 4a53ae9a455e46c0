"""Config fields of models with state layers."""

from typing import Any

from kvkeep.models.gguf.file import GgufFile

STATE_ARCHS = ("lfm2",)  # state the KV heads of each layer, 0 for a layer without attention
_KV_HEADS_KEY = "{arch}.attention.head_count_kv"


def state_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of state layers; empty without them. Raises UnsupportedModel."""
    if file.arch == "lfm2":
        return _lfm2_config(file)
    return {}


def _lfm2_config(file: GgufFile) -> dict[str, Any]:
    if file.non_negative_int("{arch}.attention.sliding_window", 0):
        raise file.unsupported_error("has local layers (attention.sliding_window)")
    kv_heads = _kv_heads_per_layer(file)
    first_state_layer = kv_heads.index(0) if 0 in kv_heads else 0
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": file.positive_int("{arch}.shortconv.l_cache"),
        "conv_bias": f"blk.{first_state_layer}.shortconv.conv.bias" in file.tensors,
        "block_auto_adjust_ff_dim": False,  # the file states the width as it is
    }


def _kv_heads_per_layer(file: GgufFile) -> list[int]:
    """Return the KV heads of each layer: 0, or the same number."""
    num_layers = file.layer_count()
    if not isinstance(file.value(_KV_HEADS_KEY), list):
        return [file.positive_int(_KV_HEADS_KEY)] * num_layers
    kv_heads = file.integers(_KV_HEADS_KEY)
    if len(kv_heads) != num_layers or min(kv_heads) < 0 or max(kv_heads) == 0:
        expected = f"a whole number for each of {num_layers} layers, and one of them at least 1"
        raise file.invalid_error(_KV_HEADS_KEY, expected)
    if len(set(kv_heads) - {0}) > 1:
        raise file.unsupported_error(f"has different KV heads in its layers ({kv_heads})")
    return kv_heads
