"""Evaluating tokens into a memory, one step at a time, and re-evaluating the newest of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from kvkeep.cache import KVCache, Segment, Window
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.segment import GROWTH
from kvkeep.cache.step import DecodeStep
from kvkeep.compression.methods.apply import Compression
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import require_finite
from kvkeep.session.memory import Memory

_LOCAL_STEP = 512  # tokens that are re-evaluated at a time for local layers


@dataclass(frozen=True)
class StepResult:
    """The result of one step for one memory.

    hidden: `[n, hidden_size]` of the step's tokens. peak_cells: the number of cells held during
    the step. compressions: those that the policy did at its end.
    """

    hidden: Tensor
    peak_cells: int
    compressions: Sequence[Compression]


class StepTransaction:
    """One forward whose tokens are appended to one or several memories, all of them or none.

    It opens a step of each memory's cache. The caller evaluates `tokens` with `step`, under
    `torch.inference_mode()`, and then calls `commit` or `rollback`. As a context manager it rolls
    back if the block raises:

        with StepTransaction([memory], [[17]]) as step:
            hidden = step.forward()
            step.commit(hidden, decoder.logits(hidden))     # token 17 is in the memory

    After a rollback the memories must be discarded: they are successors or forks that a
    `session_transaction` or the caller drops.

    step: a step of n tokens of one memory, or a GroupStep of one token of each.
    tokens: `[n]` int64 on the cache's device: of one memory, or one of each.
    """

    step: AnyStep

    def __init__(
        self,
        memories: Sequence[Memory],
        chunks: Sequence[Sequence[int]],
        sampled: bool = False,
        grouped: bool = False,
    ):
        """Open a step of each memory's cache, which its policy has just opened for these tokens.

        chunks: the token ids for each memory. sampled: whether the model itself has chosen them.
        grouped: whether `step` is a GroupStep. If not, there is one memory.
        """
        self._memories, self._chunks = memories, chunks
        self._cells_before = [memory.cache.cells for memory in memories]
        self._cache_steps = ExitStack()
        # If one of these raises, the open steps are garbage, and they are never committed.
        steps = [
            self._cache_steps.enter_context(memory.cache.step(len(chunk), sampled))
            for memory, chunk in zip(memories, chunks, strict=True)
        ]
        decode_steps = [step for step in steps if isinstance(step, DecodeStep)]
        self.step = GroupStep(decode_steps) if grouped else steps[0]
        ids = [token for chunk in chunks for token in chunk]
        device = memories[0].cache.layout.device
        self.tokens = torch.tensor(ids, dtype=torch.int64, device=device)

    def __enter__(self) -> "StepTransaction":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.rollback()

    def forward(self) -> Tensor:
        """Evaluate the tokens; return the hidden states, `[n, hidden_size]`."""
        return self._memories[0].decoder.hidden(self.tokens, self.step)

    def commit(self, hidden: Tensor, logits: Tensor | None) -> list[StepResult]:
        """Keep the tokens' cells, append the tokens to the memories and let the policies settle.

        hidden: `[n, hidden_size]` of `tokens`. logits: `[memories, vocab]`, finite, of the last
        token of each memory; None to compute them when they are first needed. Then `hidden` is
        checked instead. Raises NonFiniteLogits.
        """
        if logits is None:
            require_finite(hidden)
        self._cache_steps.close()
        results, several = [], len(self._memories) > 1
        for index, (memory, chunk) in enumerate(zip(self._memories, self._chunks, strict=True)):
            # Rows are copied: the last row of one session must not keep those of all in memory.
            rows = hidden[index : index + 1].clone() if several else hidden
            last_logits = None
            if logits is not None:
                last_logits = logits[index].clone() if several else logits[0]
            memory.append(chunk, rows if several else rows[-1:].clone(), last_logits)
            count = len(chunk)
            peak = self._cells_before[index] + count if count > 1 else memory.cache.cells
            results.append(StepResult(rows, peak, memory.policy.settle(memory.cache)))
        return results

    def rollback(self) -> None:
        """End the cache steps without committing them. Does nothing after a commit."""
        failed = _StepRolledBackError()
        self._cache_steps.__exit__(type(failed), failed, None)


class _StepRolledBackError(Exception):
    """Ends a cache step that is not to be committed."""


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
    size = min(len(ids) - done, prefill_step - done % prefill_step)
    # Space for an answer to a long prompt is reserved, or its first token would move all cells.
    reserved = GROWTH if len(ids) > GROWTH else 0
    count = memory.policy.open(memory.cache, size, len(ids) - done - size + reserved)
    return evaluate_chunk(memory, ids[done : done + count], done + count == len(ids), sampled)


def evaluate_chunk(
    memory: Memory, chunk: Sequence[int], last: bool = False, sampled: bool = False
) -> StepResult:
    """Evaluate tokens for which the policy has just opened the cache, in one step.

    last: whether no more tokens follow, so that logits are computed. sampled: see `evaluate_step`.
    """
    with StepTransaction([memory], [chunk], sampled) as step:
        hidden = step.forward()
        logits = memory.decoder.logits(hidden[-1:]) if last else None
        (result,) = step.commit(hidden, logits)
    return result


def rewind(memory: Memory, count: int) -> list[int]:
    """Remove and return the last `count` tokens; the new last one is re-evaluated for its logits.

    Raises InvalidArgument for a negative count, and if that token is no longer held.
    """
    memory.require_rewind(count)
    if count == 0:
        return []
    removed = memory.remove_newest(count)
    last, pinned = memory.pop_last()
    reevaluate(memory, last, pinned)
    return removed


def reevaluate(
    memory: Memory, last: Sequence[int], pinned: bool, max_local: int | None = None
) -> None:
    """Evaluate the last token anew, over the cells that are there now.

    It is evaluated as a token of a prompt, even if it was sampled, so that the result is that of a
    session that was fed these tokens.

    last, pinned: what `Memory.pop_last` returned.
    max_local: the most tokens that are evaluated to refill local layers; None for no limit.
    """
    _refill_local(memory, max_local)
    for _ in evaluate(memory, last, 1):
        pass
    if pinned:
        memory.pin(len(memory.tokens) - 1, len(memory.tokens))


def _refill_local(memory: Memory, max_tokens: int | None) -> None:
    """Compute the cells of local layers anew if some that the next token sees are missing.

    Local layers have evicted what lies before their window. Their cells are computed from all
    tokens that are held without a gap, or from the last `max_tokens` of them. In a memory that
    holds all its tokens, the result equals the cells that were there.
    """
    local = memory.cache.local
    if local is None or local.window.size is None:
        return
    if local.cells < min(local.window.size - 1, len(memory.tokens)):
        count = memory.rewindable if max_tokens is None else min(max_tokens, memory.rewindable)
        ids = memory.tokens[len(memory.tokens) - count :]
        local.segments = local_segments(memory.decoder, memory.cache, ids)


def local_segments(decoder: Decoder, cache: KVCache, ids: Sequence[int]) -> list[Segment]:
    """Return the segments of local layers after evaluating tokens, without cells before these.

    cache: its newest cells are those of `ids`; it does not change. Raises NonFiniteLogits.
    """
    scratch = cache.fork()
    scratch.observer, scratch.window = None, Window()
    scratch.drop_newest(len(ids))
    scratch.serial -= len(ids)  # the tokens get the same serials again
    assert scratch.local is not None
    scratch.local.segments = []
    scratch.segments.append(Segment(scratch.layout, len(ids)))
    fill_cache(decoder, scratch, ids, _LOCAL_STEP)
    return scratch.local.segments


@torch.inference_mode()
def fill_cache(decoder: Decoder, cache: KVCache, ids: Sequence[int], step_size: int) -> None:
    """Evaluate tokens into the newest segment of a cache. Raises NonFiniteLogits."""
    for first in range(0, len(ids), step_size):
        step_ids = ids[first : first + step_size]
        chunk = torch.tensor(step_ids, dtype=torch.int64, device=cache.layout.device)
        with cache.step(len(chunk)) as step:
            require_finite(decoder.hidden(chunk, step))
