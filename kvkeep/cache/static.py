"""A decode step of constant shapes and addresses, which a CUDA graph can replay.

Once a window is a full ring, each token writes one of its slots and sees all of them. The slot and
the query positions are then values in buffers; everything else is the same for each token.
"""

import torch
from torch import Tensor

from kvkeep.cache.attention import combine, merge_heads
from kvkeep.cache.rope import Rotation
from kvkeep.cache.step import DecodeStep

Geometry = tuple[object, ...]


def geometry(step: DecodeStep) -> Geometry | None:
    """Return all that a replay requires to stay the same; None if the next step will differ."""
    if not step.in_full_ring or step.queries is not None or step.local:
        return None
    if any(view.slots.quantised or view.bias is not None for view in step.views):
        return None
    addresses = [(v.slots.keys.data_ptr(), v.slots.values.data_ptr()) for v in step.views]
    spans = [(view.span.start, view.span.stop, view.rotation) for view in step.views]
    return *addresses, *spans, len(step.query_positions)


class StaticStep:
    """A replacement for the decode step in every forward of one geometry.

    slot: `[1]` int64, the slot of the new cell. cosine, sine: `[rotations, 1, head_dim]` float32.
    """

    def __init__(self, step: DecodeStep):
        self._written = step.newest.block.slots
        self._views = list(step.views)
        self._attention = step.attention
        device = self._written.keys.device
        shape = (len(step.query_positions), 1, self._written.keys.shape[-1])
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.cosine = torch.zeros(shape, dtype=torch.float32, device=device)
        self.sine = torch.zeros(shape, dtype=torch.float32, device=device)

    def load(self, step: DecodeStep) -> None:
        """Set the buffers to the values of another step of the same geometry."""
        rotation = step.attention.rope.at([positions[0] for positions in step.query_positions])
        self.slot.fill_(step.slot)
        self.cosine.copy_(rotation.cosine)
        self.sine.copy_(rotation.sine)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attend as `Step.attend` does, for one token."""
        rotations = [Rotation(c, s) for c, s in zip(self.cosine, self.sine, strict=True)]
        rope = self._attention.rope
        assert k is not None
        assert v is not None
        key = rope.rotate_layer(layer, k, rotations[0]).transpose(0, 1)
        self._written.keys[layer].index_copy_(1, self.slot, key)
        self._written.values[layer].index_copy_(1, self.slot, v.transpose(0, 1))
        queries = [rope.rotate_layer(layer, q, rotation) for rotation in rotations]
        parts = [
            view.attend(layer, queries[view.rotation], self._attention) for view in self._views
        ]
        part = self._attention.with_sinks(layer, combine(parts), 1)
        return merge_heads(part.out, 1).to(q.dtype)
