"""Who attends in a step, where a forward is not the kernels' own."""

import torch

from kvkeep.cache import LayerAttention, Layout
from kvkeep.cache.layers import LayerDispatch
from kvkeep.cache.step import ChunkStep
from kvkeep.compiled.binding import HEAD_DIMS, library
from kvkeep.compiled.chunk import ChunkAttention
from kvkeep.models.layers.executor import AnyStep


def can_attend(layout: Layout) -> bool:
    """Whether the kernels read such cells on this machine."""
    on_cpu = layout.device.type == "cpu" and layout.dtype is torch.bfloat16
    return on_cpu and layout.head_dim in HEAD_DIMS and library() is not None


def attention_of(step: AnyStep) -> LayerAttention:
    """The step, or the kernels in its place where they can attend."""
    kernels = library()
    if kernels is None or not isinstance(step, ChunkStep):
        return step.layer_attention
    steps = [step, *([step.local] if isinstance(step.local, ChunkStep) else [])]
    if not all(can_attend(each.newest.layout.plain) for each in steps):
        return step.layer_attention
    attention = [ChunkAttention(each, kernels) for each in steps]
    return LayerDispatch(step.placements, *attention) if len(steps) == 2 else attention[0]
