"""A model as the decode kernels read it: its layers, groups of layers, MLPs and experts."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import pointer
from functools import partial
from typing import TypeAlias

import torch

from kvkeep.compiled import binding as c
from kvkeep.compiled.operands import ModelOperands, require
from kvkeep.models.layers.experts import EXPERT_SCALES, PARALLEL_NORMS, ROUTER_SCALE
from kvkeep.models.layers.gemma import LAYER_PARTS, PROJECTION, PROJECTION_NORM, TABLE
from kvkeep.models.layers.network import embedding_multiplier, per_layer_multiplier
from kvkeep.models.layers.primitives import EMBEDDING, HEAD
from kvkeep.models.spec.model_spec import GATINGS, LayerGroup, ModelSpec

_MATRICES = {
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

# A group of layers, and the query scale of those of its layers that it stands for; None for none.
KernelGroup: TypeAlias = tuple[LayerGroup, tuple[float, ...] | None]
# Describes a matrix by its name.
_MatrixByName: TypeAlias = Callable[[str], c.CMatrix]


def kernel_groups(spec: ModelSpec) -> list[KernelGroup]:
    """Return the kernels' groups of layers: all layers of one scale their queries alike.

    Where a group has layers with and without RoPE, and RoPE has an attention factor, the kernels
    see two groups that read the same cells.
    """
    pairs = [(group, group.query_scale(layer)) for group in spec.groups for layer in group.layers]
    return list(dict.fromkeys(pairs))


def describe_model(spec: ModelSpec, operands: ModelOperands, sampled: bool) -> c.CModel:
    """Describe a model for sampled tokens, or for those of a prompt.

    Raises KernelMismatch for weights that are not those of `spec`.
    """
    pairs = kernel_groups(spec)
    layers = (c.CLayer * spec.layers)(
        *(_layer(spec, operands, i, pairs, sampled) for i in range(spec.layers))
    )
    groups = (c.CLayerGroup * len(pairs))(*(_group(spec, operands, *pair) for pair in pairs))
    return c.CModel(
        spec.layers,
        len(pairs),
        spec.hidden_size,
        _widest_mlp(operands),
        spec.heads,
        spec.values_normed,
        spec.norm_eps,
        float(spec.unit_norms),
        embedding_multiplier(spec, torch.bfloat16),
        spec.residual_multiplier,
        spec.qk_norm_whole,
        spec.centred_norms,
        spec.parallel,
        GATINGS.index(spec.gating),
        spec.experts,
        spec.experts_per_token,
        spec.expert_size,
        spec.shared_expert_size,
        spec.norm_topk,
        operands.vector("model.norm.weight"),
        pointer(_per_layer(spec, operands, sampled)) if spec.per_layer_size else None,
        layers,
        groups,
        operands.matrix(EMBEDDING, sampled=False),
        operands.matrix(HEAD, sampled=True),
    )


def _widest_mlp(operands: ModelOperands) -> int:
    """Return the width of the widest MLP that is no expert; 0 without any."""
    gates = (name for name in operands.shapes if name.endswith(".mlp.gate_proj.weight"))
    return max((operands.shapes[name][0] for name in gates), default=0)


def _group(
    spec: ModelSpec, operands: ModelOperands, group: LayerGroup, scale: tuple[float, ...] | None
) -> c.CLayerGroup:
    return c.CLayerGroup(
        len(spec.layers_with_cells(group)),
        group.kv_heads,
        group.head_dim,
        0,
        group.softmax_scale,
        spec.attention_softcap,
        None if scale is None else operands.constant(scale, torch.float32),
        operands.constant(group.rope.inverse_frequencies, torch.float64),
    )


def _layer(
    spec: ModelSpec,
    operands: ModelOperands,
    index: int,
    groups: Sequence[KernelGroup],
    sampled: bool,
) -> c.CLayer:
    prefix = f"model.layers.{index}."
    matrix = partial(operands.matrix, sampled=sampled)
    sparse, group = spec.is_sparse(index), spec.group_of(index)
    sinks = operands.tensors.get(f"{prefix}self_attn.sinks")
    gate, projection, norm = (f"{prefix}{name}.weight" for name in LAYER_PARTS)
    scale = operands.tensors.get(f"{prefix}layer_scalar")
    return c.CLayer(
        **{field: matrix(f"{prefix}{name}.weight") for field, name in _MATRICES.items()},
        mlp=c.CMlp() if sparse and not spec.experts_beside else _mlp(f"{prefix}mlp", matrix),
        experts=pointer(_experts(spec, operands, prefix, sampled)) if sparse else None,
        **{field: operands.vector(f"{prefix}{name}.weight") for field, name in _NORMS.items()},
        per_layer_input=pointer(
            c.CPerLayerInput(matrix(gate), matrix(projection), operands.vector(norm))
        )
        if spec.per_layer_size
        else None,
        sinks=None if sinks is None else operands.constant(sinks, torch.float32),
        group=groups.index((group, group.query_scale(index))),
        cell_layer=spec.layers_with_cells(group).index(spec.kv_source(index)),
        rotated=index not in spec.unrotated_layers,
        output_scale=1.0 if scale is None else scale.item(),
    )


def _per_layer(spec: ModelSpec, operands: ModelOperands, sampled: bool) -> c.CPerLayerEmbedding:
    return c.CPerLayerEmbedding(
        operands.matrix(TABLE, sampled=False),
        operands.matrix(PROJECTION, sampled),
        operands.vector(PROJECTION_NORM),
        spec.per_layer_size,
        per_layer_multiplier(spec, torch.bfloat16),
    )


def _mlp(prefix: str, matrix: _MatrixByName) -> c.CMlp:
    return c.CMlp(*(matrix(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down")))


def _experts(
    spec: ModelSpec, operands: ModelOperands, layer: str, sampled: bool
) -> c.CMixtureOfExperts:
    """Describe a layer's experts. layer: the prefix of its tensors' names.

    Raises KernelMismatch for more experts per token than experts, which no kernel checks.
    """
    chosen, count = spec.experts_per_token, spec.experts
    require(0 < chosen <= count, f"1 to {count} experts for each token", chosen)
    matrix, prefix = partial(operands.matrix, sampled=sampled), f"{layer}mlp"
    mixture = c.CMixtureOfExperts(router=matrix(f"{prefix}.gate.weight"))
    if spec.shared_expert_size:
        mixture.shared_router = matrix(f"{prefix}.shared_expert_gate.weight")
        mixture.shared = _mlp(f"{prefix}.shared_expert", matrix)
    experts = (c.CMlp * count)(*(_mlp(f"{prefix}.experts.{i}", matrix) for i in range(count)))
    mixture.experts = ctypes.cast(experts, ctypes.POINTER(c.CMlp))
    if spec.experts_beside:
        scales = operands.tensors[f"{layer}{EXPERT_SCALES}"]
        mixture.expert_scales = operands.constant(scales, torch.float32)
        norms = {
            field: operands.vector(f"{layer}{name}.weight")
            for field, name in PARALLEL_NORMS.items()
        }
        router_scale = operands.vector(f"{layer}{ROUTER_SCALE}")
        mixture.parallel = pointer(c.CParallelExperts(**norms, router_scale=router_scale))
    return mixture
