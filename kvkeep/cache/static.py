"""A decode step of constant shapes and addresses, which a CUDA graph can replay.

Once a window is a full ring, each token writes one of its slots and sees all of them. The slot and
the query positions are then values in buffers; everything else is the same for each token.
"""

import torch
from torch import Tensor

from kvkeep.cache.rope import Rotation
from kvkeep.cache.step import DecodeStep

ReplayKey = tuple[object, ...]  # addresses, ranges and counts that a CUDA graph has recorded


def replay_key(step: DecodeStep) -> ReplayKey | None:
    """Return all that must be the same for a replay; None if the step cannot be replayed."""
    if not step.overwrites_oldest or step.queries is not None or step.local_step:
        return None
    if any(view.slots.quantised or view.bias is not None for view in step.views):
        return None
    addresses = [(v.slots.keys.data_ptr(), v.slots.values.data_ptr()) for v in step.views]
    ranges = [(v.slot_range.start, v.slot_range.stop, v.rotation_index) for v in step.views]
    return *addresses, *ranges, len(step.query_positions)


class StaticStep(DecodeStep):
    """A replacement for the decode step in every forward with one replay key.

    slot_index: `[1]` int64, the slot of the new cell. cosine, sine: `[rotations, 1, head_dim]`
    float32.
    """

    def __init__(self, step: DecodeStep):
        vars(self).update(vars(step))  # the views, which every step with this replay key has
        slots = step.newest_segment.block.slots
        self._keys, self._values, device = slots.keys, slots.values, slots.keys.device
        shape = (len(step.query_positions), 1, slots.keys.shape[-1])
        self.slot_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.cosine = torch.zeros(shape, dtype=torch.float32, device=device)
        self.sine = torch.zeros(shape, dtype=torch.float32, device=device)
        self.rotations = [Rotation(c, s) for c, s in zip(self.cosine, self.sine, strict=True)]

    def load(self, step: DecodeStep) -> None:
        """Set the buffers to the values of another step with the same replay key."""
        rotation = step.attention.rope.rotation_at(
            [positions[0] for positions in step.query_positions]
        )
        self.slot_index.fill_(step.slot)
        self.cosine.copy_(rotation.cosine)
        self.sine.copy_(rotation.sine)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys[layer].index_copy_(1, self.slot_index, keys.transpose(0, 1))
        self._values[layer].index_copy_(1, self.slot_index, values.transpose(0, 1))
