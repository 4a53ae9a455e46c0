"""The loss of predictions after a passage whose cells were changed or coded."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import Block, Cells
from kvkeep.evaluate.calibrate import Progress
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Full
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory
from kvkeep.storage.lossy.basis import CellBasis
from kvkeep.storage.lossy.cells import decode_cells, encode_cells, rotate

SINKS = 4  # the first cells of a passage are not measured: they are stored exactly
STEP_TOKENS = 256  # evaluated at once: the newest queries of each step are measured


@dataclass
class LossProbe:
    """A passage, and what the model predicts after it.

    memory: of the passage. keys: before rotation, and values: `[layers, kv_heads, n, head_dim]`.
    log_probs: `[FOLLOWING_TOKENS, vocab]`.
    """

    memory: Memory
    ids: Sequence[int]
    following: Sequence[int]
    frequencies: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    log_probs: Tensor
    progress: Progress

    @classmethod
    def evaluate(
        cls,
        model: LoadedModel,
        ids: Sequence[int],
        length: int,
        frequencies: Tensor,
        progress: Progress,
    ) -> "LossProbe":
        """ids: the passage of so many tokens, and those that follow."""
        memory, following = Memory(model.decoder, Full(len(ids))), ids[length:]
        for result in evaluate(memory, ids[:length], STEP_TOKENS):
            progress(result.hidden.shape[0])
        cells = Cells.concatenate([part for _, part in memory.cache.read(0, memory.cache.cells)])
        keys = rotate(cells.keys.cpu().float(), frequencies, -cells.positions)
        values, positions = cells.values.cpu().float(), cells.positions
        log_probs = _predict(memory.fork(), following)
        return cls(
            *(memory, ids, following, frequencies, keys, values, positions, log_probs, progress)
        )

    def loss(self, keys: Tensor | None = None, values: Tensor | None = None) -> float:
        """Return the KL divergence of predictions with other keys or values, before rotation."""
        state = self.memory.state()
        segment = copy.copy(state.cache.segments[0])
        cells = segment.block.slots
        count, dtype, device = segment.length, cells.keys.dtype, cells.keys.device
        new_keys, new_values = cells.keys[:, :, :count].clone(), cells.values[:, :, :count].clone()
        if keys is not None:
            rotated = rotate(keys, self.frequencies, self.positions).to(device, dtype)
            new_keys[:, :, SINKS:] = rotated[:, :, SINKS:]
        if values is not None:
            new_values[:, :, SINKS:] = values[:, :, SINKS:].to(device, dtype)
        part = cells.part(slice(0, count))
        segment.block = Block(replace(part, stored_keys=new_keys, stored_values=new_values))
        cache = replace(state.cache, segments=(segment,))
        memory = Memory.from_state(
            self.memory.decoder, self.memory.policy, self.memory.bits, replace(state, cache=cache)
        )
        log_probs = _predict(memory, self.following)
        self.progress(len(self.following))
        return float((self.log_probs.exp() * (self.log_probs - log_probs)).sum(-1).mean())


def _predict(memory: Memory, following: Sequence[int]) -> Tensor:
    """Return the log-probabilities of the tokens that follow, `[n, vocab]`."""
    assert memory.hidden is not None
    hidden = [memory.hidden]
    hidden += [result.hidden for result in evaluate(memory, following, STEP_TOKENS)]
    logits: Tensor = memory.decoder.logits(torch.cat(hidden)[:-1])
    return logits.log_softmax(-1)


def coding_loss(probe: LossProbe, basis: CellBasis, step: float) -> float:
    """Return the loss of a passage whose cells are coded and decoded."""
    rotated = rotate(probe.keys, probe.frequencies, probe.positions).to(basis.layout.dtype)
    values = probe.values.to(basis.layout.dtype)
    decoded = [
        decode_cells(
            encode_cells(cells, probe.positions, basis, step, is_key),
            *(probe.positions, basis, step, is_key),
        ).float()
        for cells, is_key in ((rotated, True), (values, False))
    ]
    decoded[0] = rotate(decoded[0], probe.frequencies, -probe.positions)
    return probe.loss(*decoded)
