"""A memory's checkpoints, and going back to its earlier tokens by them."""

import copy

from kvkeep import validation
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.restoring import restored_cache
from kvkeep.errors import InvalidArgument
from kvkeep.session.memory import Memory


def take_checkpoint(memory: Memory, at_answer_end: bool = False) -> None:
    """Copy what later tokens overwrite, if anything, to come back to this token.

    at_answer_end: whether a sampled answer may end here: see `Checkpoints.answer_ends`.

    Drops checkpoints that can no longer be used, since tokens have been evicted or compressed.
    """
    if not (memory.overwrites and memory.checkpoints.max_bytes > 0 and memory.tokens):
        return
    oldest, total = _oldest_usable(memory), len(memory.tokens)
    memory.checkpoints = memory.checkpoints.from_(oldest)
    if oldest <= total and memory.holds_overwritten():
        checkpoint, present = memory.cache.checkpoint(total), memory.checkpoints
        add = present.with_answer_end if at_answer_end else present.added
        memory.checkpoints = add(checkpoint)


def drop_unusable_checkpoints(memory: Memory) -> None:
    """Drop checkpoints that evicted or compressed tokens have made useless."""
    memory.checkpoints = memory.checkpoints.from_(_oldest_usable(memory))


def usable_checkpoint(memory: Memory, num_tokens: int) -> Checkpoint | None:
    """Return the newest checkpoint after at most `num_tokens` tokens, if it is still true.

    None if later tokens are not held without a gap; and for local windows if any tokens were
    evicted, because these windows may contain what they said.
    """
    checkpoint, total = memory.checkpoints.newest(num_tokens), len(memory.tokens)
    if checkpoint is None:
        return None
    num_later = total - checkpoint.num_tokens
    # An edit in place moves the clock of the tokens before it.
    is_same_time = checkpoint.time == memory.cache.time - num_later
    num_needed = num_later if memory.decoder.spec.keeps_states else total
    return checkpoint if is_same_time and num_needed <= memory.num_held else None


def num_rewindable(memory: Memory) -> int:
    """Return how many of the newest tokens can be removed, plus one that is evaluated again.

    Those that are held without a gap. If layers keep states, only those since the oldest
    checkpoint, unless all tokens are held: then states are computed anew from the beginning.
    """
    held, total = memory.num_held, len(memory.tokens)
    if not memory.decoder.spec.keeps_states or held == total:
        return held
    usable = [c.num_tokens for c in memory.checkpoints.entries if total - c.num_tokens <= held]
    return total - usable[0] if usable else 0


def max_rewind(memory: Memory) -> int:
    """Return how many of the newest tokens a rewind can remove, unless it removes all."""
    rewindable = num_rewindable(memory)
    return rewindable if rewindable == len(memory.tokens) else max(0, rewindable - 1)


def require_rewind(memory: Memory, count: int) -> None:
    """Raise InvalidArgument if the last `count` tokens cannot be removed by a rewind."""
    if count == 0:
        return
    rewindable, total, maximum = num_rewindable(memory), len(memory.tokens), max_rewind(memory)
    if 0 <= count <= maximum:
        return
    if maximum == total:
        raise InvalidArgument(f"rewind takes 0 to {total} tokens; found {count}")
    raise InvalidArgument(
        f"rewind takes 0 to {maximum} tokens, or all {total}; found {count}: only the last "
        f"{rewindable} are in the cache without a gap, and one must remain"
    )


def take_back(memory: Memory, count: int) -> None:
    """Remove the last `count` tokens, and the logits, without evaluating any token again.

    Raises InvalidArgument if cells of earlier tokens were evicted, or if there are not as many.
    """
    total = len(memory.tokens)
    if not (count := validation.integer("count", count, 0, total)):
        return
    is_held = memory.holds_overwritten(count)
    checkpoint = None if is_held else _checkpoint_at(memory, total - count)
    if not holds_beginning(memory, total - count):
        raise InvalidArgument(
            f"the last {count} tokens cannot be removed: earlier cells were evicted, or layers "
            "keep states"
        )
    memory.drop_newest(count)
    if checkpoint:
        memory.cache.load_checkpoint(checkpoint)


def holds_beginning(memory: Memory, count: int) -> bool:
    """Whether all cells, local windows and states are held as they were after `count` tokens.

    Windows and states are held by a checkpoint there, or still in the cache.
    """
    total = len(memory.tokens)
    holds_overwritten = memory.holds_overwritten(total - count)
    has_them = holds_overwritten or _checkpoint_at(memory, count) is not None
    return has_them and memory.num_held == total


def beginning(memory: Memory, count: int) -> Memory:
    """Return a memory of the first `count` tokens, as if no others had come, without logits.

    Its cells lie as in a memory that was given these tokens alone, so that it continues to the
    bit as that one would; those of a fork do not. They are copied on the first write. Raises
    InvalidArgument if these tokens are not all held.
    """
    held, total = memory.num_held, len(memory.tokens)
    # The local windows that are held may have been computed anew, in other steps.
    checkpoint = _checkpoint_at(memory, count)
    if held != total:
        raise InvalidArgument(
            f"the first {count} tokens are not all in the cache: only the last {held} of "
            f"{total} are, without a gap"
        )
    if not (checkpoint or memory.holds_overwritten(total - count)):
        ends = ", ".join(str(each.num_tokens) for each in memory.checkpoints.entries)
        raise InvalidArgument(
            f"local windows or states after {count} tokens are not held: expected all {total} "
            f"tokens, or as many as a checkpoint has ({ends or 'there is none'})"
        )
    first = copy.copy(memory)
    # Not a fork, which cuts its cells where it begins and so changes the order of sums.
    first.cache = restored_cache(memory.cache, memory.cache.state())
    first.drop_newest(total - count)
    if checkpoint:
        first.cache.load_checkpoint(checkpoint)
        first.checkpoints = first.checkpoints.branched(count)
    first.cache.unseal()
    return first


def _oldest_usable(memory: Memory) -> int:
    """Return after how many tokens, at least, a checkpoint can be used."""
    segments, total = memory.cache.segments, len(memory.tokens)
    is_changed = any(s.compressed or s.position_map.group > 1 for s in segments)
    if not is_changed and memory.cache.cells >= total:
        return 0
    held = memory.num_held
    return total - held if memory.decoder.spec.keeps_states or held == total else total + 1


def _checkpoint_at(memory: Memory, num_tokens: int) -> Checkpoint | None:
    """Return the checkpoint after so many tokens, if there is one and it is still true."""
    checkpoint = usable_checkpoint(memory, num_tokens)
    return checkpoint if checkpoint and checkpoint.num_tokens == num_tokens else None
