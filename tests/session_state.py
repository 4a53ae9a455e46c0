"""All that a session is, to compare one with another to the bit."""

from collections.abc import Iterator
from typing import Any

import torch

from kvkeep.cache import RaggedCells, Segment
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.quantised import stored_tensors
from kvkeep.session.session import Session

Whole = dict[str, Any]


def whole_state(session: Session) -> Whole:
    """Everything that says what a session does next, in copies: it changes no more.

    Tokens, cells to the bit and where they lie, what is pinned and named, the sampler, the newest
    queries, the policy with all that it decides by, and the settings.
    """
    state, memory, cache = session.core.state, session.core.memory, session.cache
    queries = cache.observer.queries() if cache.observer else None
    return {
        "tokens": list(session.tokens),
        "serials": list(memory.serials),
        "pins": sorted(memory.pins),
        "spans": dict(state.spans),
        "sampler": state.sampler.state(),
        "keep_whole_prompt": state.keep_whole_prompt,
        "prefill_step": session.prefill_step,
        "policy": memory.policy.name,
        "policy settings": memory.policy.settings(),
        "policy state": {name: plain(value) for name, value in vars(memory.policy).items()},
        "bits": memory.bits,
        "time": cache.time,
        "serial": cache.serial,
        "window": cache.window,
        "queries": None if queries is None else (queries.vectors.clone(), queries.times.clone()),
        "hidden": None if memory.hidden is None else memory.hidden.clone(),
        "logits": session.logits,
        "states": {name: state.clone() for name, state in cache.recurrent_states.items()},
        "segments": [segment_state(segment) for segment in cache.all_segments],
        "checkpoints": [checkpoint_state(each) for each in memory.checkpoints.entries],
        "checkpoint settings": (
            memory.checkpoints.max_bytes,
            memory.checkpoints.branch,
            memory.checkpoints.answer_ends,
        ),
    }


def held_state(session: Session) -> Whole:
    """Return the tokens, logits and cells of a session, without its policy and its storage."""
    return {
        "tokens": list(session.tokens),
        "time": session.cache.time,
        "keep": session.keep,
        "logits": session.logits,
        "segments": [
            (*vars(x.read(0, x.length)).values(), x.position_map, x.is_anchor)
            for x in session.cache.all_segments
        ],
    }


def checkpoint_state(checkpoint: Checkpoint) -> Whole:
    """A checkpoint: all that the session takes from it."""
    return {
        "tokens": checkpoint.num_tokens,
        "time": checkpoint.time,
        "branches": checkpoint.branches,
        "segments": [segment_state(segment) for segment in checkpoint.local_segments],
        "states": dict(checkpoint.recurrent_states),
    }


def plain(value: object) -> object:
    """A value of a policy, as far as it can be compared."""
    if isinstance(value, int | float | str | None):
        return value
    return (type(value).__name__, dict(vars(value)))


def segment_state(segment: Segment) -> Whole:
    """A segment: its cells, oldest first, and their places, which round sums; not its storage."""
    cells = segment.read(0, segment.length)
    return {
        "keys": [x.clone() for x in stored_tensors(cells.stored_keys)],
        "values": [x.clone() for x in stored_tensors(cells.stored_values)],
        "positions": cells.positions,
        "serials": cells.serials,
        "bias": cells.bias,
        "counts": cells.counts if isinstance(cells, RaggedCells) else None,
        "worth": cells.scores if isinstance(cells, RaggedCells) else None,
        "layout": segment.layout,
        "map": segment.position_map,
        "anchor": segment.is_anchor,
        "frozen": segment.frozen,
        "sealed": segment.sealed,
        "lazy_growth": segment.grows_lazily,
        "arriving": segment.arriving_count,
        "limit": segment.limit,
        "place": segment.first_place,
        "length": segment.length,
    }


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two states differ, in words; nothing if they are the same to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{where}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"
        elif not torch.equal(one, other):
            yield f"{where}: {int((one != other).sum())} numbers of {one.numel()}"
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from differences(one[name], other[name], f"{where} {name}".strip())
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} of them"
        for index, (each, its) in enumerate(zip(one, other, strict=False)):
            yield from differences(each, its, f"{where}[{index}]")
    elif one != other:
        yield f"{where}: {one!r}, {other!r}"


def same(one: Whole, other: Whole) -> bool:
    """Whether two states are the same to the bit."""
    return not any(differences(one, other))


def going_on(session: Session, sampled: int = 3) -> Whole:
    """What becomes of a session that reads two tokens and writes some: its state after that."""
    from kvkeep import Sampling

    warm = Sampling(temperature=1.0, seed=5)
    session.feed([7, 9])
    for _ in range(sampled):
        session.next_token(warm)
    return whole_state(session)
