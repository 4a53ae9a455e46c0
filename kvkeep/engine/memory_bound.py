"""The bound of the memory that a session can take: what an engine reserves for it."""

import math

from kvkeep.cache.checkpoint import MAX_ANSWER_ENDS, max_checkpoint_count
from kvkeep.cache.segment import MIN_GROWTH
from kvkeep.engine.steps import MIN_MESSAGE_STEP
from kvkeep.session.memory import Memory
from kvkeep.session.session import Session

# Storage exceeds the cells of a budget by at most this factor, whatever was edited, pinned or
# forked. Growing storage exceeds the held cells by no more than that, or by a few cells.
_STORAGE_FACTOR = 9 / 8


def max_session_bytes(session: Session, new_tokens: int | None) -> int:
    """Return the most bytes of a session after `new_tokens` more tokens; None for any number."""
    return max_memory_bytes(session.core.memory, session.prefill_step, new_tokens)


def max_memory_bytes(memory: Memory, prefill_step: int, new_tokens: int | None) -> int:
    """Return the most bytes of a memory after `new_tokens` more tokens; None for any number."""
    cache, budget = memory.cache, memory.policy.max_kv_size
    cells = budget if new_tokens is None else cache.cells + new_tokens
    slots = min(_STORAGE_FACTOR * cells + MIN_GROWTH, _STORAGE_FACTOR * budget)
    cell_bytes = max(cache.layout.cell_bytes, cache.far_layout.cell_bytes)
    step_bytes = prefill_step * cache.layout.plain.cell_bytes
    total = math.ceil(slots * cell_bytes) + step_bytes
    if (local_cache := cache.local_cache) is not None:  # 128: cells beyond it, for rewinds
        window, local_bytes = local_cache.window.size or budget, local_cache.layout.cell_bytes
        total += math.ceil(min(budget, window + 128) * local_bytes * _STORAGE_FACTOR)
        total += prefill_step * local_bytes
    if (states := memory.decoder.spec.states) is not None:
        total += states.nbytes(cache.layout.dtype)
    total += _max_checkpoint_bytes(memory, prefill_step, cells, new_tokens)
    return max(total, memory.nbytes)


def _max_checkpoint_bytes(
    memory: Memory, prefill_step: int, num_tokens: int, new_tokens: int | None
) -> int:
    """Return the most bytes that a memory's checkpoints take after `new_tokens` more tokens.

    num_tokens: in the cache then. Any of the present checkpoints may stay; another one is taken
    before the new tokens, one at the end of each step, and some where the answer may end.
    """
    # Of two steps in a row, one may be shorter: see `StepGrid`.
    cache, step = memory.cache, max(1, min(prefill_step // 2, MIN_MESSAGE_STEP))
    count = max_checkpoint_count(num_tokens, step)
    if new_tokens is not None:
        count = min(count, 1 + 2 * new_tokens // step)
    count += len(memory.checkpoints.entries) + 1 + MAX_ANSWER_ENDS
    nbytes = sum(state.nbytes for state in cache.recurrent_states.values())
    if (states := memory.decoder.spec.states) is not None:
        nbytes = states.nbytes(cache.layout.dtype)
    if (local_cache := cache.local_cache) is not None:
        capacity = min(num_tokens, local_cache.window.capacity or num_tokens)
        nbytes += capacity * local_cache.layout.cell_bytes
    return min(memory.checkpoints.max_bytes, count * nbytes)
