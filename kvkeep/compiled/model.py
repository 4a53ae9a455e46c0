"""A model as the kernels of a decode step read it: layer by layer, and group by group."""

from collections.abc import Sequence
from ctypes import pointer
from functools import partial
from typing import TypeAlias

import torch

from kvkeep.compiled.binding import CGroup, CLayer, CMlp, CModel, COwnInput, CPerLayer
from kvkeep.compiled.experts import mixture, mlp
from kvkeep.compiled.held import Held
from kvkeep.models.layers.network import embedding_multiplier, per_layer_multiplier
from kvkeep.models.layers.per_layer import LAYER_PARTS, NORM, PROJECTION, TABLE
from kvkeep.models.spec.model_spec import GATINGS, LayerGroup, ModelSpec
from kvkeep.models.weights.tensors import EMBEDDING, HEAD

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

# A group of layers, and what multiplies their queries; None for nothing.
KernelGroup: TypeAlias = tuple[LayerGroup, tuple[float, ...] | None]


def kernel_groups(spec: ModelSpec) -> list[KernelGroup]:
    """The groups of layers as the kernels know them: all layers of one scale queries alike.

    Where layers with and without RoPE lie in one group and RoPE has an attention factor, they are
    two of the kernels' groups, which look at the same cells.
    """
    pairs = [(group, group.query_scale(layer)) for group in spec.groups for layer in group.layers]
    return list(dict.fromkeys(pairs))


def described_model(spec: ModelSpec, held: Held, sampled: bool) -> CModel:
    """For tokens that were sampled, or for those of a prompt.

    Raises KernelMismatch for weights that are not those of `spec`.
    """
    pairs = kernel_groups(spec)
    layers = (CLayer * spec.layers)(
        *(_layer(spec, held, i, pairs, sampled) for i in range(spec.layers))
    )
    groups = (CGroup * len(pairs))(*(_group(spec, held, *pair) for pair in pairs))
    return CModel(
        spec.layers,
        len(pairs),
        spec.hidden_size,
        _widest(held),
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
        held.pointer("model.norm.weight"),
        pointer(_per_layer(spec, held, sampled)) if spec.per_layer_size else None,
        layers,
        groups,
        held.matrix(EMBEDDING, sampled=False),
        held.matrix(HEAD, sampled=True),
    )


def _widest(held: Held) -> int:
    """Of all MLPs that are no experts; 0 where there are none."""
    gates = (name for name in held.shapes if name.endswith(".mlp.gate_proj.weight"))
    return max((held.shapes[name][0] for name in gates), default=0)


def _group(
    spec: ModelSpec, held: Held, group: LayerGroup, scale: tuple[float, ...] | None
) -> CGroup:
    return CGroup(
        len(spec.layers_with_cells(group)),
        group.kv_heads,
        group.head_dim,
        0,
        group.softmax_scale,
        spec.attention_softcap,
        None if scale is None else held.kept(scale, torch.float32),
        held.kept(group.rope.inverse_frequencies, torch.float64),
    )


def _layer(
    spec: ModelSpec, held: Held, index: int, groups: Sequence[KernelGroup], sampled: bool
) -> CLayer:
    prefix = f"model.layers.{index}."
    matrix = partial(held.matrix, sampled=sampled)
    sparse, group = spec.is_sparse(index), spec.group_of(index)
    sinks = held.tensors.get(f"{prefix}self_attn.sinks")
    own = [f"{prefix}{name}.weight" for name in LAYER_PARTS]
    scale = held.tensors.get(f"{prefix}layer_scalar")
    return CLayer(
        **{role: matrix(f"{prefix}{name}.weight") for role, name in _MATRICES.items()},
        mlp=CMlp() if sparse and not spec.experts_beside else mlp(f"{prefix}mlp", matrix),
        mixture=pointer(mixture(spec, held, prefix, sampled)) if sparse else None,
        **{role: held.pointer(f"{prefix}{name}.weight") for role, name in _NORMS.items()},
        own=pointer(COwnInput(matrix(own[0]), matrix(own[1]), held.pointer(own[2])))
        if spec.per_layer_size
        else None,
        sinks=None if sinks is None else held.kept(sinks, torch.float32),
        group=groups.index((group, group.query_scale(index))),
        place=spec.layers_with_cells(group).index(spec.kv_source(index)),
        rotated=index not in spec.unrotated_layers,
        scale=1.0 if scale is None else scale.item(),
    )


def _per_layer(spec: ModelSpec, held: Held, sampled: bool) -> CPerLayer:
    return CPerLayer(
        held.matrix(TABLE, sampled=False),
        held.matrix(PROJECTION, sampled),
        held.pointer(NORM),
        spec.per_layer_size,
        per_layer_multiplier(spec, torch.bfloat16),
    )
