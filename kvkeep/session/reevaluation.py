"""Evaluating tokens of a memory again, over cells that have changed before them."""

from collections.abc import Callable, Sequence

import torch

from kvkeep.cache import KVCache, Window
from kvkeep.session.checkpoints import usable_checkpoint
from kvkeep.session.evaluation import evaluate_into_segment, evaluate_step, make_room_for_chunk
from kvkeep.session.memory import Memory

REFILL_STEP_TOKENS = 512  # evaluated again at a time for local layers and states


def reevaluate_last(
    memory: Memory,
    last_ids: Sequence[int],
    pinned: bool,
    max_local_windows: int | None = None,
    step_size: int = REFILL_STEP_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Evaluate the token that a memory popped, if any, anew over the cells that are there now.

    It is evaluated as a token of a prompt, even if it was sampled, so that the result is that of a
    session that was fed these tokens. Returns how many tokens before it were evaluated again.

    last_ids, pinned: from `Memory.pop_last`. The others: see `refill_overwritten`.
    """
    if not last_ids:
        return 0
    num_refilled = refill_overwritten(memory, max_local_windows, step_size, progress)
    evaluate_popped(memory, last_ids, pinned)
    return num_refilled


def evaluate_popped(memory: Memory, last_ids: Sequence[int], pinned: bool) -> None:
    """Evaluate the token that a memory popped, if any. The arguments are from `Memory.pop_last`."""
    if last_ids:
        evaluate_step(memory, last_ids, 0, 1)
        if pinned:
            memory.pin(len(memory.tokens) - 1, len(memory.tokens))


@torch.inference_mode()
def place_popped(memory: Memory, last_ids: Sequence[int]) -> None:
    """Append the token that a memory popped, if any, with a cell that has no keys and values yet.

    All else is as after `evaluate_popped`, but there is no hidden state: `evaluate_placed` follows.
    last_ids: from `Memory.pop_last`, of a token that was not pinned.
    """
    if last_ids:
        make_room_for_chunk(memory, last_ids, 0, 1)
        with memory.cache.step(1):
            pass  # no layer writes to the cell
        memory.append(last_ids, None, None)
        memory.policy.enforce_bounds(memory.cache)


def evaluate_placed(memory: Memory) -> None:
    """Evaluate the last token, which `place_popped` placed; it keeps its serial."""
    last_ids, pinned = memory.pop_last()
    memory.cache.serial -= len(last_ids)
    evaluate_popped(memory, last_ids, pinned)


def refill_overwritten(
    memory: Memory,
    max_local_windows: int | None = None,
    step_size: int = REFILL_STEP_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Compute anew what removed tokens had overwritten: cells of local layers, and states.

    They are computed from the newest checkpoint on; without one, from all tokens that are held
    without a gap. In a memory that holds all its tokens, the result equals what was there, to
    rounding. Returns how many tokens were evaluated again.

    max_local_windows: only so many windows of local layers, without a checkpoint. step_size: the
    most tokens that are evaluated at a time. progress: called after each step with the number of
    tokens in it; the memory has changed after the last one only.
    """
    if not memory.tokens or memory.holds_overwritten():
        return 0
    count, checkpoint = memory.num_held, None
    local = memory.cache.local_cache
    if local is not None and local.window.size is not None and max_local_windows is not None:
        count = min(count, max_local_windows * local.window.size)
    if max_local_windows is None and (newest := usable_checkpoint(memory, len(memory.tokens))):
        count, checkpoint = len(memory.tokens) - newest.num_tokens, newest
    scratch_cache = memory.cache.fork()
    scratch_cache.observer, scratch_cache.window = None, Window()
    scratch_cache.drop_newest(count)
    scratch_cache.serial -= count  # the tokens get the same serials again
    if scratch_cache.local_cache is not None:
        scratch_cache.local_cache.segments = []
    if checkpoint is not None:
        scratch_cache.load_checkpoint(checkpoint)
    if count:
        ids = memory.tokens[len(memory.tokens) - count :]
        with torch.inference_mode():
            segment = scratch_cache.append_segment(count, is_anchor=False)
        for num_evaluated in evaluate_into_segment(memory.decoder, scratch_cache, ids, step_size):
            if progress:
                progress(num_evaluated)
        segment.frozen = True
    memory.cache.take_overwritten(scratch_cache)
    return count


def refilled_before(
    memory: Memory, count: int, step_size: int, progress: Callable[[int], None] | None
) -> KVCache | None:
    """Compute what a rewind of the last `count` tokens needs of overwritten parts.

    Returns a cache that has them, for `KVCache.take_overwritten`; None if they are held. The memory
    does not change. step_size, progress: see `refill_overwritten`.
    """
    if count in (0, len(memory.tokens)) or memory.holds_overwritten(count + 1):
        return None
    fork = memory.fork()
    fork.rewind(count)
    refill_overwritten(fork, None, step_size, progress)
    return fork.cache
