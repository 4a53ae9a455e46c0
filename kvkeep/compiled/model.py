"""Describes models to the compiled kernels: structures of layers, groups, MLPs and experts."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import pointer
from functools import partial
from typing import TypeAlias

import torch

from kvkeep.compiled import structures as c
from kvkeep.compiled.operands import ModelOperands, require
from kvkeep.compiled.states import describe_state_layer, input_factors, state_shape
from kvkeep.models.layers.experts import (
    EXPERT_SCALES,
    PARALLEL_NORMS,
    ROUTER_SCALE,
    SELECTION_BIAS,
)
from kvkeep.models.layers.gemma import LAYER_PARTS, PER_LAYER_TABLE, PROJECTION, PROJECTION_NORM
from kvkeep.models.layers.network import embedding_multiplier, per_layer_multiplier
from kvkeep.models.layers.primitives import EMBEDDING, LM_HEAD
from kvkeep.models.spec.model_spec import GATINGS, LayerGroup, ModelSpec

# Fields of CModel that the spec has under the same name.
_SPEC_FIELDS = (
    *("hidden_size", "heads", "values_normed", "norm_eps", "residual_multiplier", "qk_norm_whole"),
    *("centred_norms", "parallel", "experts_per_token", "expert_size", "shared_expert_size"),
    *("norm_topk", "sigmoid_router", "routed_scale", "gated_attention"),
    *("attention_input_multiplier", "attention_output_multiplier"),
    *("gate_multiplier", "mlp_output_multiplier"),
)
# Fields of CLayer, and the names of their matrices and norms in a layer.
_PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
}
_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}

# A model's group of layers, and the query scale of its layers in this group; None for no scale.
KernelGroup: TypeAlias = tuple[LayerGroup, tuple[float, ...] | None]
_DescribeMatrix: TypeAlias = Callable[[str], c.CMatrix]  # its argument is the matrix's name


def kernel_groups(spec: ModelSpec) -> list[KernelGroup]:
    """Return the kernels' groups of layers. All layers of a group have the same query scale.

    A model's group of which only some layers have RoPE, with an attention factor, becomes two
    groups that read the same cells.
    """
    pairs = [(group, group.query_scale(layer)) for group in spec.groups for layer in group.layers]
    return list(dict.fromkeys(pairs))


def describe_model(spec: ModelSpec, operands: ModelOperands, sampled: bool) -> c.CModel:
    """Describe a model to the kernels.

    sampled: for sampled tokens, which read packed weights, and not for a prompt's tokens. Raises
    KernelMismatch for weights that `spec` does not describe.
    """
    groups = kernel_groups(spec)
    c_layers = [_describe_layer(spec, operands, i, groups, sampled) for i in range(spec.layers)]
    c_groups = [_describe_group(spec, operands, *group) for group in groups]
    up_names = [name for name in operands.shapes if name.endswith(".mlp.up_proj.weight")]
    model = c.CModel(
        **{field: getattr(spec, field) for field in _SPEC_FIELDS},
        layer_count=len(c_layers),
        group_count=len(c_groups),
        mlp_size=max((operands.shapes[name][0] for name in up_names), default=0),
        norm_offset=float(spec.unit_norms),
        embedding_multiplier=embedding_multiplier(spec, torch.bfloat16),
        activation=GATINGS.index(spec.gating),
        expert_count=spec.experts,
        norm=operands.address_of("model.norm.weight"),
        layers=(c.CLayer * len(c_layers))(*c_layers),
        groups=(c.CLayerGroup * len(c_groups))(*c_groups),
        embedding=operands.describe_matrix(EMBEDDING, sampled=False),
        head=operands.describe_matrix(LM_HEAD, sampled=True),
    )
    if spec.states is not None:
        shape = state_shape(spec, spec.states)
        if factors := input_factors(spec.states):
            shape.input_factors = operands.copy_address(factors, torch.float32)
        model.states = pointer(shape)
    if spec.per_layer_size:
        per_layer = c.CPerLayerEmbedding(
            table=operands.describe_matrix(PER_LAYER_TABLE, sampled=False),
            projection=operands.describe_matrix(PROJECTION, sampled),
            norm=operands.address_of(PROJECTION_NORM),
            size=spec.per_layer_size,
            table_multiplier=per_layer_multiplier(spec, torch.bfloat16),
        )
        model.per_layer = pointer(per_layer)
    return model


def _describe_group(
    spec: ModelSpec,
    operands: ModelOperands,
    group: LayerGroup,
    query_scale: tuple[float, ...] | None,
) -> c.CLayerGroup:
    return c.CLayerGroup(
        len(spec.layers_with_cells(group)),
        group.kv_heads,
        group.head_dim,
        0,
        group.softmax_scale,
        spec.attention_softcap,
        None if query_scale is None else operands.copy_address(query_scale, torch.float32),
        operands.copy_address(group.rope.inverse_frequencies, torch.float64),
    )


def _describe_layer(
    spec: ModelSpec,
    operands: ModelOperands,
    index: int,
    groups: Sequence[KernelGroup],
    sampled: bool,
) -> c.CLayer:
    prefix = f"model.layers.{index}."
    describe = partial(operands.describe_matrix, sampled=sampled)
    has_experts = spec.has_experts(index)
    sinks = operands.tensors.get(f"{prefix}self_attn.sinks")
    output_scale = operands.tensors.get(f"{prefix}layer_scalar")
    layer = c.CLayer(
        **{field: describe(f"{prefix}{name}.weight") for field, name in _PROJECTIONS.items()},
        **{field: operands.address_of(f"{prefix}{name}.weight") for field, name in _NORMS.items()},
        sinks=None if sinks is None else operands.copy_address(sinks, torch.float32),
        rotated=index not in spec.unrotated_layers,
        output_scale=1.0 if output_scale is None else output_scale.item(),
    )
    if spec.states is not None and spec.is_state_layer(index):
        layer.state = pointer(describe_state_layer(operands, spec.states, index, sampled))
    if spec.has_attention(index):
        group = spec.group_of(index)
        layer.group = groups.index((group, group.query_scale(index)))
        layer.cell_layer = spec.layers_with_cells(group).index(spec.kv_source(index))
    if spec.mlp_layers is not None and spec.has_mlp(index):  # its input has the only norm
        layer.mlp_norm = layer.attention_norm
    if spec.has_mlp(index) and (spec.experts_beside or not has_experts):
        layer.mlp = _describe_mlp(f"{prefix}mlp", describe)
    if has_experts:
        layer.experts = pointer(_describe_experts(spec, operands, prefix, sampled))
    if spec.per_layer_size:
        *matrix_names, norm_name = (f"{prefix}{name}.weight" for name in LAYER_PARTS)
        gate, projection = map(describe, matrix_names)
        norm_address = operands.address_of(norm_name)
        layer.per_layer_input = pointer(c.CPerLayerInput(gate, projection, norm_address))
    return layer


def _describe_mlp(prefix: str, describe: _DescribeMatrix) -> c.CMlp:
    names = (f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return c.CMlp(*map(describe, names))


def _describe_experts(
    spec: ModelSpec, operands: ModelOperands, layer_prefix: str, sampled: bool
) -> c.CMixtureOfExperts:
    """Describe a layer's experts. layer_prefix: of the layer's tensor names.

    Raises KernelMismatch for more experts per token than experts, which no kernel checks.
    """
    per_token, num_experts = spec.experts_per_token, spec.experts
    require(0 < per_token <= num_experts, f"1 to {num_experts} experts for each token", per_token)
    describe = partial(operands.describe_matrix, sampled=sampled)
    prefix = f"{layer_prefix}mlp"
    mixture = c.CMixtureOfExperts(router=describe(f"{prefix}.gate.weight"))
    if spec.shared_expert_size:
        mixture.shared_router = describe(f"{prefix}.shared_expert_gate.weight")
        mixture.shared = _describe_mlp(f"{prefix}.shared_expert", describe)
    experts = [_describe_mlp(f"{prefix}.experts.{i}", describe) for i in range(num_experts)]
    mixture.experts = ctypes.cast((c.CMlp * num_experts)(*experts), ctypes.POINTER(c.CMlp))
    if spec.router_bias:
        bias = operands.tensors[f"{layer_prefix}{SELECTION_BIAS}"]
        mixture.selection_bias = operands.copy_address(bias, torch.float32)
    if spec.experts_beside:
        scales = operands.tensors[f"{layer_prefix}{EXPERT_SCALES}"]
        mixture.expert_scales = operands.copy_address(scales, torch.float32)
        norms = {
            field: operands.address_of(f"{layer_prefix}{name}.weight")
            for field, name in PARALLEL_NORMS.items()
        }
        router_scale = operands.address_of(f"{layer_prefix}{ROUTER_SCALE}")
        mixture.parallel = pointer(c.CParallelExperts(**norms, router_scale=router_scale))
    return mixture
