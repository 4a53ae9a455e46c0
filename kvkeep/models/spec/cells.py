"""The cells that a model's layers need: their layouts, and an empty cache for them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvkeep.cache import AttentionConfig, Bits, KVCache, LayerPlacement, Layout, Rope, Window
from kvkeep.models.spec.model_spec import LayerGroup, ModelSpec
from kvkeep.models.weights.tensors import NORM

UNDO = 128  # tokens that can be taken back before local layers lack some that they would see


def cell_layout(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Layout:
    """Of the layers that see everything, as cells are evaluated.

    They are of the weights' dtype, and where the weights are.
    """
    weight = tensors[NORM]
    return layout_of(spec, spec.groups[0], weight.dtype, weight.device)


def layout_of(
    spec: ModelSpec, group: LayerGroup, dtype: torch.dtype, device: torch.device
) -> Layout:
    """Of a group's layers; those that look at another's cells have none."""
    layers = len(spec.keepers(group))
    return Layout(layers, group.kv_heads, group.head_dim, dtype, device)


def new_cache(
    spec: ModelSpec, tensors: Mapping[str, Tensor], bits: Bits, most: int | None = None
) -> KVCache:
    """An empty cache for a model's cells.

    most: the most cells of any layer, so that a window of local layers is no longer than that.
    """
    dtype, device = tensors[NORM].dtype, tensors[NORM].device
    whole = spec.groups[0]
    near, far = bits.layouts(layout_of(spec, whole, dtype, device))
    how = _attending(spec, whole, tensors, device)
    if len(spec.groups) == 1:
        return KVCache(near, how, far)
    group = spec.groups[1]
    layout, _ = bits.layouts(layout_of(spec, group, dtype, device))
    local = KVCache(layout, _attending(spec, group, tensors, device))
    most = spec.window + UNDO if most is None else most
    size = min(spec.window, most)
    local.window = Window(size, spare=min(UNDO, most - size))
    return KVCache(near, how, far, local, _placements(spec))


def _placements(spec: ModelSpec) -> tuple[LayerPlacement, ...]:
    groups = [spec.keepers(group) for group in spec.groups]
    local = [layer in spec.local_layers for layer in range(spec.layers)]
    return tuple(
        LayerPlacement(local[layer], groups[local[layer]].index(spec.source_of(layer)))
        for layer in range(spec.layers)
    )


def _attending(
    spec: ModelSpec, group: LayerGroup, tensors: Mapping[str, Tensor], device: torch.device
) -> AttentionConfig:
    layers, sinks = spec.keepers(group), None
    if spec.sinks:
        sinks = torch.stack([tensors[f"model.layers.{i}.self_attn.sinks"].float() for i in layers])
    unrotated = [index for index, layer in enumerate(layers) if layer in spec.unrotated_layers]
    rope = Rope(group.rope.inverse_frequencies, device, unrotated)
    return AttentionConfig(spec.heads, rope, group.softmax_scale, spec.attention_softcap, sinks)
