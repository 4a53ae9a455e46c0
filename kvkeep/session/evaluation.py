"""Evaluating tokens into a memory, step by step, and evaluating some of them anew."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.cache.segment import GROWTH
from kvkeep.session.local_layers import local_cells
from kvkeep.session.memory import Memory
from kvkeep.session.transaction import StepResult, StepTransaction

_LOGITS_ROWS = 64  # rows of logits computed at a time: those of a whole prompt would not fit


def evaluate(memory: Memory, ids: Sequence[int], prefill_step: int) -> Iterator[StepResult]:
    """Evaluate token ids into a memory, one step at each iteration."""
    done = 0
    while done < len(ids):
        result = evaluate_step(memory, ids, done, prefill_step)
        done += result.hidden.shape[0]
        yield result


@torch.inference_mode()
def evaluate_step(
    memory: Memory, ids: Sequence[int], done: int, prefill_step: int, sampled: bool = False
) -> StepResult:
    """Evaluate at most `prefill_step` of the ids, of which the first `done` are in the memory.

    Steps end at multiples of `prefill_step`, whatever the policy made of those before: two prompts
    with a common beginning are evaluated in the same steps for as long as they are equal. With
    `prefill_step` 512 and 300 tokens in the memory, the next step is of 212.

    sampled: whether the model itself has chosen the ids; `prefill_step` must be 1 then.
    """
    wanted = min(len(ids) - done, prefill_step - done % prefill_step)
    # Room for an answer to a long prompt is reserved, or its first token would move all cells.
    answer = GROWTH if len(ids) > GROWTH else 0
    count = memory.policy.open(memory.cache, wanted, len(ids) - done - wanted + answer)
    return evaluate_chunk(memory, ids[done : done + count], done + count == len(ids), sampled)


def evaluate_chunk(
    memory: Memory, chunk: Sequence[int], last: bool = False, sampled: bool = False
) -> StepResult:
    """Evaluate tokens for which the policy has just opened the cache, in one step.

    last: whether no more tokens follow, so that logits are computed. sampled: see `evaluate_step`.
    """
    decoder = memory.decoder
    with StepTransaction([memory], [chunk], sampled) as step:
        hidden = decoder.hidden(step.tokens, step.step)
        logits = decoder.logits(hidden[-1:]) if last else None
        (result,) = step.commit(hidden, logits)
    return result


def rewind(memory: Memory, count: int) -> list[int]:
    """Remove and return the last `count` tokens; the new last one is re-evaluated for its logits.

    Raises InvalidArgument for a negative count, and if that token is no longer held.
    """
    memory.require_rewind(count)
    if count == 0:
        return []
    removed = memory.tokens[len(memory.tokens) - count :]
    memory.drop_newest(count)
    memory.drop_lost_pins()
    evaluate_last(memory)
    return removed


def evaluate_last(memory: Memory, most: int | None = None) -> None:
    """Evaluate the last token anew, over the cells that are there now.

    It is evaluated as a token of a prompt, even if it was sampled, so that the result is that of a
    session that was fed these tokens.

    most: as for `refill_local`.
    """
    last, pinned = memory.tokens[-1:], bool(memory.pins & set(memory.serials[-1:]))
    if pinned:  # the token gets another serial
        memory.unpin(len(memory.tokens) - 1, len(memory.tokens))
    memory.drop_newest(len(last))
    refill_local(memory, most)
    for _ in evaluate(memory, last, 1):
        pass
    if pinned:
        memory.pin(len(memory.tokens) - 1, len(memory.tokens))


def refill_local(memory: Memory, most: int | None = None) -> None:
    """Compute the cells of local layers anew if some that the next token sees are missing.

    They are computed from all tokens that are held without a gap, or from the last `most` of them.
    In a memory that holds all its tokens, the result equals the cells that were there.
    """
    local = memory.cache.local
    if local is None or local.window.size is None:
        return
    if local.cells < min(local.window.size - 1, len(memory.tokens)):
        count = memory.rewindable if most is None else min(most, memory.rewindable)
        ids = memory.tokens[len(memory.tokens) - count :]
        local.segments = local_cells(memory.decoder, memory.cache, ids)


@torch.inference_mode()
def log_probabilities(memory: Memory, hidden: Tensor, targets: Sequence[int]) -> Tensor:
    """Return the natural log of each target's probability after each hidden state.

    hidden: `[n, hidden_size]`. Returns `[n]` float64 on the CPU.
    """
    wanted = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
    parts = [torch.empty(0, dtype=torch.float64, device="cpu")]
    for first in range(0, len(targets), _LOGITS_ROWS):
        rows = slice(first, first + _LOGITS_ROWS)
        logits = memory.decoder.logits(hidden[rows])
        chosen = logits.gather(1, wanted[rows, None])[:, 0]
        # Converted on the CPU: not every device has float64.
        parts.append(chosen.cpu().double() - logits.logsumexp(-1).cpu().double())
    return torch.cat(parts)
