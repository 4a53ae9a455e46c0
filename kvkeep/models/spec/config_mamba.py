"""Config fields of models with Mamba-2 layers, as `ModelSpec` fields."""

import math
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.spec.config_fields import ConfigFields, is_positive_number
from kvkeep.models.spec.config_layers import MAX_LAYERS
from kvkeep.models.spec.state_layers import MambaNorm, StateLayers

ATTENTION = "full_attention"
_STATE, _MLP, _EXPERTS = "linear_attention", "mlp", "moe"
# By their names in configs, and by their letters in patterns.
_NEMOTRON_KINDS = {
    "M": _STATE,
    "*": ATTENTION,
    "-": _MLP,
    "E": _EXPERTS,
    "mamba": _STATE,
    "attention": ATTENTION,
    **{kind: kind for kind in (_STATE, ATTENTION, _MLP, _EXPERTS)},
}


def mamba_fields(config: ConfigFields) -> dict[str, Any]:
    """Return `states`, and which layers with attention have no RoPE (Granite 4-H, Bamba)."""
    layers = state_layers(config, _mamba_layer_types(config), "linear_attention")
    fields: dict[str, Any] = {}
    if config.get("position_embedding_type", "rope") != "rope":
        attending = set(range(config.num_layers)) - set(layers)
        fields["unrotated_layers"] = tuple(sorted(attending))
    if not layers:
        return fields
    require_silu(config, "hidden_act")
    inner_size = config.positive_int("mamba_expand") * config.positive_int("hidden_size")
    return {**fields, "states": _mamba_states(config, layers, inner_size)}


def falcon_h1_fields(config: ConfigFields) -> dict[str, Any]:
    """Return `states` of all layers, and Falcon-H1's multipliers."""
    if config.num_layers > MAX_LAYERS:
        raise config.invalid_error("num_hidden_layers", f"at most {MAX_LAYERS}")
    if bool(config.get("projectors_bias")) != bool(config.get("mamba_proj_bias")):
        raise config.unsupported_error("only one of Mamba-2's projections has a bias")
    require_silu(config, "hidden_act")
    hidden_size, heads = (config.positive_int(x) for x in ("hidden_size", "num_attention_heads"))
    inner_size = config.positive_int(
        "mamba_d_ssm", default=config.positive_int("mamba_expand") * hidden_size
    )
    norm: MambaNorm = "none"
    if config.get("mamba_rms_norm"):
        norm = "before_gate" if config.get("mamba_norm_before_gate") else "after_gate"
    part_multipliers = _multipliers(config, "ssm_multipliers", 5)
    states = _mamba_states(
        config,
        tuple(range(config.num_layers)),
        inner_size,
        beside_attention=True,
        norm=norm,
        input_multiplier=config.positive_float("ssm_in_multiplier", default=1.0),
        output_multiplier=config.positive_float("ssm_out_multiplier", default=1.0),
        part_multipliers=() if set(part_multipliers) == {1.0} else part_multipliers,
    )
    gate_multiplier, mlp_output_multiplier = _multipliers(config, "mlp_multipliers", 2)
    fields = {"states": states, "gate_multiplier": gate_multiplier}
    fields["mlp_output_multiplier"] = mlp_output_multiplier
    # That of keys is part of the softmax scale.
    if (key_multiplier := config.positive_float("key_multiplier", default=1.0)) != 1:
        head_dim = config.positive_int("head_dim", default=max(1, hidden_size // heads))
        fields["attention_multiplier"] = key_multiplier * head_dim**-0.5
    names = {
        "attention_in_multiplier": "attention_input_multiplier",
        "attention_out_multiplier": "attention_output_multiplier",
        "embedding_multiplier": "embedding_multiplier",
        "lm_head_multiplier": "logits_multiplier",
    }
    multipliers = {name: config.positive_float(field, default=1.0) for field, name in names.items()}
    return {**fields, **multipliers}


def nemotron_h_config(config: ConfigFields) -> ConfigFields:
    """Return a config of Nemotron-H with the names that other families have.

    `layer_types` names each layer's kind. Without experts or without an MLP in any layer, fields of
    them do not count.
    """
    kinds = config.get("layers_block_type")
    if kinds is None:
        kinds = config.get("hybrid_override_pattern")
    if kinds is None:
        field = "layers_block_type"
        raise BadModelFile(f"{config.path} lacks the field {field}; fetch the model again")
    if isinstance(kinds, str):
        kinds = list(kinds)
    if not isinstance(kinds, list) or not 0 < len(kinds) <= MAX_LAYERS:
        expected = f"the kinds of 1 to {MAX_LAYERS} layers"
        raise config.invalid_error("layers_block_type", expected)
    layer_types = [_NEMOTRON_KINDS.get(x, x) if isinstance(x, str) else x for x in kinds]
    values: dict[str, Any] = {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}
    if _EXPERTS not in layer_types:
        values["num_local_experts"] = None
    if _MLP not in layer_types:
        values["intermediate_size"] = config.get("moe_intermediate_size")
    return config.updated(values)


def nemotron_h_fields(config: ConfigFields) -> dict[str, Any]:
    """Return `states`, the layers with an MLP alone, and which attention has no RoPE: all."""
    layer_types = config.get("layer_types")
    unknown = [kind for kind in layer_types if kind not in _NEMOTRON_KINDS.values()]
    if unknown:
        raise config.unsupported_error(f"layers of kind {unknown[0]!r} (layers_block_type)")
    layers_of = {
        kind: tuple(layer for layer, found in enumerate(layer_types) if found == kind)
        for kind in _NEMOTRON_KINDS.values()
    }
    if not layers_of[ATTENTION]:
        raise config.unsupported_error("no layer has attention (layers_block_type)")
    if layers_of[_EXPERTS] and config.get("mlp_bias"):
        raise config.unsupported_error("experts have biases (mlp_bias)")
    if layers_of[_EXPERTS] and config.positive_int("n_group", default=1) > 1:
        raise config.unsupported_error("experts are chosen by groups (n_group)")
    fields: dict[str, Any] = {
        "mlp_layers": tuple(sorted(layers_of[_MLP] + layers_of[_EXPERTS])),
        "unrotated_layers": layers_of[ATTENTION],
    }
    if layers_of[_EXPERTS]:
        fields["dense_layers"] = layers_of[_MLP]
        fields["expert_latent_size"] = config.non_negative_int("moe_latent_size", default=0)
    if layers := layers_of[_STATE]:
        require_silu(config, "mamba_hidden_act")
        inner_size = config.positive_int("mamba_n_heads") * config.positive_int("mamba_d_head")
        fields["states"] = _mamba_states(config, layers, inner_size)
    return fields


def _multipliers(config: ConfigFields, field: str, count: int) -> tuple[float, ...]:
    """Return a list of so many multipliers, 1 by default."""
    values = config.get(field)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise config.invalid_error(field, f"a list of {count} numbers")
    if not all(map(is_positive_number, values)):
        raise config.invalid_error(field, "positive numbers")
    return tuple(map(float, values))


def _mamba_states(
    config: ConfigFields, layers: tuple[int, ...], inner_size: int, **further: Any
) -> StateLayers:
    """Return Mamba-2 layers whose heads have together inner_size dimensions.

    further: fields that only some families have.
    """
    heads, groups, width, state_size = (
        config.positive_int(f"mamba_{name}")
        for name in ("n_heads", "n_groups", "d_conv", "d_state")
    )
    head_dim = config.get("mamba_d_head")
    if head_dim is None or head_dim == "auto":
        head_dim = inner_size // heads
    if heads * head_dim != inner_size:
        raise config.invalid_error("mamba_n_heads", f"heads of together {inner_size} dimensions")
    if heads % groups:
        raise config.invalid_error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    if width < 2:
        raise config.invalid_error("mamba_d_conv", "at least 2")
    if not _is_unlimited(config.get("time_step_limit")):
        raise config.unsupported_error("steps are limited (time_step_limit)")
    return StateLayers(
        "mamba2",
        layers,
        inner_size + 2 * groups * state_size,
        width,
        conv_bias=bool(config.get("mamba_conv_bias")),
        key_heads=groups,
        value_heads=heads,
        key_dim=state_size,
        value_dim=head_dim,
        proj_bias=bool(config.get("mamba_proj_bias")),
        **further,
    )


def _mamba_layer_types(config: ConfigFields) -> Any:
    """Return each layer's type, in transformers' present names."""
    num_layers = min(config.num_layers, MAX_LAYERS + 1)
    if "attn_layer_indices" in config.values:  # Bamba
        indices = config.get("attn_layer_indices") or []
        if not isinstance(indices, list):
            raise config.invalid_error("attn_layer_indices", "a list of whole numbers")
        is_attention = [layer in indices for layer in range(num_layers)]
        return [ATTENTION if flag else "linear_attention" for flag in is_attention]
    layer_types = config.get("layer_types")
    if layer_types is None:
        return ["linear_attention"] * num_layers
    if not isinstance(layer_types, list):
        return layer_types
    names = {"mamba": "linear_attention", "attention": ATTENTION}
    return [names.get(kind, kind) if isinstance(kind, str) else kind for kind in layer_types]


def _is_unlimited(limit: Any) -> bool:
    """Whether a range of steps, as a config states it, bounds none of them."""
    if limit is None:
        return True
    endless = (math.inf, "Infinity", {"__float__": "Infinity"})
    return isinstance(limit, list) and len(limit) == 2 and limit[0] == 0 and limit[1] in endless


def require_silu(config: ConfigFields, field: str) -> None:
    """Raise UnsupportedModel if the field states another activation: that of state layers."""
    activation = config.get(field, "silu")
    if activation not in ("silu", "swish"):
        raise config.unsupported_error(f"state layers with activation {activation!r} ({field})")


def state_layers(config: ConfigFields, layer_types: Any, state_type: str) -> tuple[int, ...]:
    """Return the layers of a type among `layer_types`; all others must have attention."""
    num_layers = config.num_layers
    if num_layers > MAX_LAYERS:
        raise config.invalid_error("num_hidden_layers", f"at most {MAX_LAYERS}")
    if layer_types is None:
        return ()
    kinds = f"{ATTENTION} or {state_type}"
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.invalid_error("layer_types", f"{kinds} for each of {num_layers} layers")
    unknown = [kind for kind in layer_types if kind not in (ATTENTION, state_type)]
    if unknown:
        raise config.unsupported_error(f"layers of kind {unknown[0]!r}, not {kinds} (layer_types)")
    if ATTENTION not in layer_types:
        raise config.unsupported_error(f"none of {num_layers} layers has attention (layer_types)")
    return tuple(layer for layer, kind in enumerate(layer_types) if kind == state_type)
