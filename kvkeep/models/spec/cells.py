"""The layouts of a model's cells, and an empty cache for them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvkeep.cache import AttentionConfig, Bits, KVCache, LayerPlacement, Layout, Rope, Window
from kvkeep.models.layers.primitives import FINAL_NORM
from kvkeep.models.spec.model_spec import LayerGroup, ModelSpec

# Cells that local layers hold beyond their window: so many of the newest tokens can be removed (by
# a rewind) and the window is still whole.
UNDO_TOKENS = 128


def group_layout(
    spec: ModelSpec, group: LayerGroup, dtype: torch.dtype, device: torch.device
) -> Layout:
    """Return the layout of a group's cells, without layers that attend to another layer's."""
    layer_count = len(spec.layers_with_cells(group))
    return Layout(layer_count, group.kv_heads, group.head_dim, dtype, device)


def new_cache(
    spec: ModelSpec, tensors: Mapping[str, Tensor], bits: Bits, max_kv_size: int | None = None
) -> KVCache:
    """Return an empty cache for a model's cells. bits: of stored cells. tensors: its weights.

    max_kv_size: the budget of a session's policy, which bounds the cells of local layers, too.
    """
    dtype, device = tensors[FINAL_NORM].dtype, tensors[FINAL_NORM].device
    global_group = spec.groups[0]
    layout, far_layout = bits.layouts(group_layout(spec, global_group, dtype, device))
    attention = _attention_config(spec, global_group, tensors, device)
    if len(spec.groups) == 1:
        all_attend = all(map(spec.has_attention, range(spec.layers)))
        placements = () if all_attend else _placements(spec)
        return KVCache(layout, attention, far_layout, placements=placements)
    local_group = spec.groups[1]
    local_layout, _ = bits.layouts(group_layout(spec, local_group, dtype, device))
    local_cache = KVCache(local_layout, _attention_config(spec, local_group, tensors, device))
    max_local_cells = spec.window + UNDO_TOKENS if max_kv_size is None else max_kv_size
    window_size = min(spec.window, max_local_cells)
    spare_cells = min(UNDO_TOKENS, max_local_cells - window_size)
    local_cache.window = Window(window_size, spare_cells=spare_cells)
    return KVCache(layout, attention, far_layout, local_cache, _placements(spec))


def _placements(spec: ModelSpec) -> tuple[LayerPlacement, ...]:
    """Return for each layer which cache its cells are in, and their index among its layers.

    Layers without attention, which have no cells, get -1.
    """
    cached_layers = [spec.layers_with_cells(group) for group in spec.groups]
    placements = []
    for layer in range(spec.layers):
        is_local = layer in spec.local_layers
        if not spec.has_attention(layer):
            placements.append(LayerPlacement(is_local, -1))
        else:
            index = cached_layers[is_local].index(spec.kv_source(layer))
            placements.append(LayerPlacement(is_local, index))
    return tuple(placements)


def _attention_config(
    spec: ModelSpec, group: LayerGroup, tensors: Mapping[str, Tensor], device: torch.device
) -> AttentionConfig:
    """Return how the layers of a group attend: heads, RoPE, scale, softcap and sinks."""
    layers, sinks = spec.layers_with_cells(group), None
    if spec.sinks:
        sinks = torch.stack([tensors[f"model.layers.{i}.self_attn.sinks"].float() for i in layers])
    unrotated = [index for index, layer in enumerate(layers) if layer in spec.unrotated_layers]
    rope = Rope(group.rope.inverse_frequencies, device, unrotated)
    return AttentionConfig(spec.heads, rope, group.softmax_scale, spec.attention_softcap, sinks)
