"""The bound of the memory that a session can take: what an engine reserves for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.cache import Bits
from kvkeep.cache.checkpoint import MAX_ANSWER_ENDS, max_checkpoint_count
from kvkeep.cache.segment import MIN_GROWTH
from kvkeep.engine.steps import MIN_MESSAGE_STEP
from kvkeep.session.memory import Memory
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.document import layout_of

# Storage exceeds the cells of a budget by at most this factor, whatever was edited, pinned or
# forked. Growing storage exceeds the held cells by no more than that, or by a few cells.
_STORAGE_FACTOR = 9 / 8


def max_session_bytes(session: Session, new_tokens: int | None) -> int:
    """Return the most bytes of a session after `new_tokens` more tokens; None for any number."""
    return MemoryBound.of(session).max_bytes(new_tokens)


def max_memory_bytes(memory: Memory, prefill_step: int, new_tokens: int | None) -> int:
    """Return the most bytes of a memory after `new_tokens` more tokens; None for any number."""
    return MemoryBound.of_memory(memory, prefill_step).max_bytes(new_tokens)


@dataclass(frozen=True)
class MemoryBound:
    """The sizes that bound the memory of a session, without its cells.

    step_bytes: of the new cells of a prefill step. local_bytes, state_bytes: of local layers and
    states, 0 for none. checkpoint_bytes: of the states in one checkpoint. local_cell_bytes,
    local_capacity: of the window that a checkpoint holds, too; the capacity is None for all cells.
    """

    cells: int
    budget: int
    cell_bytes: int
    prefill_step: int
    step_bytes: int
    local_bytes: int = 0
    state_bytes: int = 0
    checkpoints: int = 0  # that it has
    max_checkpoint_bytes: int = 0  # of all of them
    checkpoint_bytes: int = 0
    local_cell_bytes: int = 0
    local_capacity: int | None = None
    nbytes: int = 0  # that it takes now

    @classmethod
    def of(cls, session: Session) -> "MemoryBound":
        """Return the sizes of a session's memory."""
        return cls.of_memory(session.core.memory, session.prefill_step)

    @classmethod
    def of_memory(cls, memory: Memory, prefill_step: int) -> "MemoryBound":
        """Return the sizes of a memory that is evaluated in steps of `prefill_step` tokens."""
        cache, budget = memory.cache, memory.policy.max_kv_size
        local_bytes, local_cell_bytes, local_capacity = 0, 0, None
        if (local_cache := cache.local_cache) is not None:  # 128: cells beyond it, for rewinds
            window, local_cell_bytes = (
                local_cache.window.size or budget,
                local_cache.layout.cell_bytes,
            )
            local_bytes = math.ceil(min(budget, window + 128) * local_cell_bytes * _STORAGE_FACTOR)
            local_bytes += prefill_step * local_cell_bytes
            local_capacity = local_cache.window.capacity or None
        states = memory.decoder.spec.states
        state_bytes = 0 if states is None else states.nbytes(cache.layout.dtype)
        present_bytes = sum(state.nbytes for state in cache.recurrent_states.values())
        return cls(
            cells=cache.cells,
            budget=budget,
            cell_bytes=max(cache.layout.cell_bytes, cache.far_layout.cell_bytes),
            prefill_step=prefill_step,
            step_bytes=prefill_step * cache.layout.plain.cell_bytes,
            local_bytes=local_bytes,
            state_bytes=state_bytes,
            checkpoints=len(memory.checkpoints.entries),
            max_checkpoint_bytes=memory.checkpoints.max_bytes,
            checkpoint_bytes=present_bytes if states is None else state_bytes,
            local_cell_bytes=local_cell_bytes,
            local_capacity=local_capacity,
            nbytes=memory.nbytes,
        )

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "MemoryBound":
        """Return a lower bound of the sizes of a saved session, from the document of its file.

        Only cells that are not quantised count, and none of local layers.
        """
        segments = [entry for entry in document["segments"] if not entry.get("local", False)]
        is_plain = Bits(**document.get("bits", {})) == Bits()
        cell_bytes = layout_of(document["layout"]).cell_bytes if is_plain else 0
        prefill_step = document["settings"]["prefill_step"]
        return cls(
            cells=sum(entry["length"] for entry in segments),
            budget=document["policy"]["max_kv_size"],
            cell_bytes=cell_bytes,
            prefill_step=prefill_step,
            step_bytes=prefill_step * cell_bytes,
        )

    def of_beginning(self, cells: int) -> "MemoryBound":
        """Return a lower bound of the same for a session with its first `cells` cells."""
        return replace(self, cells=min(cells, self.cells), checkpoints=0, nbytes=0)

    def max_bytes(self, new_tokens: int | None) -> int:
        """Return the most bytes after `new_tokens` more tokens; None for any number."""
        cells = self.budget if new_tokens is None else self.cells + new_tokens
        slots = min(_STORAGE_FACTOR * cells + MIN_GROWTH, _STORAGE_FACTOR * self.budget)
        total = math.ceil(slots * self.cell_bytes) + self.step_bytes
        total += self.local_bytes + self.state_bytes
        total += self._max_checkpoint_bytes(cells, new_tokens)
        return max(total, self.nbytes)

    def _max_checkpoint_bytes(self, num_tokens: int, new_tokens: int | None) -> int:
        """Return the most bytes that the checkpoints take after `new_tokens` more tokens.

        num_tokens: in the cache then. Any of the present checkpoints may stay; another one is taken
        before the new tokens, one at the end of each step, and some where the answer may end.
        """
        # Of two steps in a row, one may be shorter: see `StepGrid`.
        step = max(1, min(self.prefill_step // 2, MIN_MESSAGE_STEP))
        count = max_checkpoint_count(num_tokens, step)
        if new_tokens is not None:
            count = min(count, 1 + 2 * new_tokens // step)
        count += self.checkpoints + 1 + MAX_ANSWER_ENDS
        local_cells = min(num_tokens, self.local_capacity or num_tokens)
        nbytes = self.checkpoint_bytes + local_cells * self.local_cell_bytes
        return min(self.max_checkpoint_bytes, count * nbytes)
