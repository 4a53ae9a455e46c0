"""Checkpoints of stored prompts: the local windows and states after the last token of a block.

A model with local layers or states continues from a stored prefix only where there is one: cells
alone do not have what its tokens have overwritten. A checkpoint is a file of its own beside that of
its block, so that it can be dropped without the cells.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.checks import require
from kvkeep.storage.prefixes.block import CheckpointNeed, PrefixBlock
from kvkeep.storage.snapshots.container import Container
from kvkeep.storage.snapshots.document import check_segment
from kvkeep.storage.snapshots.segments import read_segment, segment_entry, segment_tensors

CHECKPOINT_KIND, CHECKPOINT_FORMAT = "prefix-checkpoint", 1
_STATE_PREFIX = "recurrent."  # of the names of states, as in snapshots

CheckpointReader = Callable[[PrefixBlock], Checkpoint | None]


def newest_checkpoint(
    blocks: Sequence[PrefixBlock], need: CheckpointNeed, read: CheckpointReader
) -> Checkpoint | None:
    """Return the newest usable checkpoint of a prompt's stored blocks; None if there is none."""
    ends_at_step = (block for block in reversed(blocks) if not block.end % need.step)
    return next((found for found in map(read, ends_at_step) if found is not None), None)


def encode_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors of a checkpoint's file."""
    segments, tensors = checkpoint.local_segments, dict[str, Tensor]()
    for index, segment in enumerate(segments):
        tensors |= segment_tensors(index, segment)
    states = checkpoint.recurrent_states.items()
    tensors |= {f"{_STATE_PREFIX}{name}": state for name, state in states}
    entries = [segment_entry(segment, local=True) for segment in segments]
    return {"tokens": checkpoint.num_tokens, "segments": entries}, tensors


def decode_checkpoint(
    container: Container, num_tokens: int, need: CheckpointNeed
) -> Checkpoint | None:
    """Return a file's checkpoint; None unless it is one of the model, after so many tokens.

    container: the content of the file. The caller verifies that it was written under this key.
    """
    try:
        return _decode(container, num_tokens, need)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError):
        return None  # written by other software, or damaged on purpose


def _decode(container: Container, num_tokens: int, need: CheckpointNeed) -> Checkpoint:
    document, tensors, segments = container.document, container.tensors, []
    require(document["tokens"] == num_tokens, "a checkpoint after another token")
    for index, entry in enumerate(document["segments"]):
        check_segment(entry)
        if need.local_layout is None:
            raise ValueError("windows of a model without local layers")
        layout = replace(need.local_layout, device=torch.device("cpu"))
        segments.append(read_segment(index, layout, entry, tensors))
    states = {
        name.removeprefix(_STATE_PREFIX): state
        for name, state in tensors.items()
        if name.startswith(_STATE_PREFIX)
    }
    checkpoint = Checkpoint(num_tokens, num_tokens, tuple(segments), states)
    need.check(checkpoint)
    return checkpoint


def describe_checkpoint(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return what a code of a checkpoint covers besides the bytes of its tensors."""
    sizes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    fields = {name: document.get(name) for name in ("tokens", "segments")}
    return json.dumps([fields, sizes], sort_keys=True).encode()
