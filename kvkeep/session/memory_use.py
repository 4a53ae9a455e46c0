"""Bytes of the parts of a session in memory, and what changes of it would take."""

from dataclasses import dataclass

from kvkeep.cache import RaggedCells
from kvkeep.cache.storage import nbytes as storage_bytes
from kvkeep.session.checkpoints import max_rewind, num_rewindable, usable_checkpoint
from kvkeep.session.compression_plan import highest_ratio
from kvkeep.session.memory import Memory
from kvkeep.session.spans import TokenStatus


@dataclass(frozen=True)
class MemoryUse:
    """The bytes of a session's parts; their sum is `Session.nbytes`.

    cells: of the layers that see all tokens. windows: of local layers. states: of layers that keep
    a state. checkpoints: what these take beyond the session's own windows and states.
    checkpoint_ends: after which tokens they are. rewind_evaluates: how many tokens `rewind(1)`
    evaluates again; 0 if it removes the only token, None if it is refused. residual_cells: how many
    cells of all layers and KV heads stand for clusters of evicted ones. pin_room: how many more
    cells can be pinned, None for no limit. rewind_room: how many of the newest tokens a rewind can
    remove, unless it removes all. removable: tokens of which status can be deleted where others
    follow, without evaluating these again; all of them but "forgotten" can be replaced, too.
    highest_ratio: of `compress` by default, 16 at most; None if it is refused.
    """

    cells: int
    windows: int
    states: int
    checkpoints: int
    checkpoint_ends: tuple[int, ...]
    rewind_evaluates: int | None
    residual_cells: int
    pin_room: int | None
    rewind_room: int
    removable: tuple[TokenStatus, ...]
    highest_ratio: float | None


def memory_use(memory: Memory) -> MemoryUse:
    """Return what the parts of a memory take."""
    cache = memory.cache
    cells = storage_bytes(cache.segments)
    windows = 0 if cache.local_cache is None else storage_bytes(cache.local_cache.segments)
    states = sum(state.nbytes for state in cache.recurrent_states.values())
    checkpoints = memory.nbytes - cells - windows - states
    ends = tuple(each.num_tokens for each in memory.checkpoints.entries)
    rewound, ragged = evaluated_by_rewind(memory, 1), (s.block.slots for s in cache.segments)
    residual = sum(int(x.residual_mask.sum()) for x in ragged if isinstance(x, RaggedCells))
    pin_room = memory.policy.pin_room(cache, memory.pins)
    return MemoryUse(
        *(cells, windows, states, checkpoints, ends, rewound, residual, pin_room),
        *(max_rewind(memory), _removable(memory), highest_ratio(memory)),
    )


def _removable(memory: Memory) -> tuple[TokenStatus, ...]:
    """Return tokens of which status can be deleted where others follow, as `delete` does."""
    segments = memory.cache.segments
    if memory.decoder.spec.keeps_states or any(s.position_map.group > 1 for s in segments):
        return ()
    with_cells: tuple[TokenStatus, ...] = ("pinned", "kept", "window")
    return with_cells if any(s.compressed for s in segments) else (*with_cells, "forgotten")


def evaluated_by_rewind(memory: Memory, count: int) -> int | None:
    """Return how many tokens a rewind of the last `count` evaluates again; None if it is refused.

    The last token that stays is evaluated for its logits, and so are all before it that windows and
    states must be computed from.
    """
    total, rewindable = len(memory.tokens), num_rewindable(memory)
    remaining = total - count
    if remaining == 0:
        return 0
    if not 0 <= count < rewindable:
        return None
    if memory.holds_overwritten(count + 1):
        return 1
    if (checkpoint := usable_checkpoint(memory, remaining - 1)) is not None:
        return remaining - checkpoint.num_tokens
    return memory.num_held - count
