"""Evaluating tokens into a memory, one step at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KVCache
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.row_steps import row_capacity, row_steps
from kvkeep.cache.segment import MIN_GROWTH
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.compression.methods.apply import Compression
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import require_finite
from kvkeep.session.checkpoints import take_checkpoint
from kvkeep.session.memory import Memory


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    hidden: `[n, hidden_size]`. peak_cells: the most held meanwhile. compressions: by the policy.
    """

    hidden: Tensor
    peak_cells: int
    compressions: Sequence[Compression]


class StepTransaction:
    """One forward whose tokens are appended to one or several memories, all of them or none.

    It opens a step of each memory's cache, and ends them with its block:

        with StepTransaction([memory], [[17]]) as transaction:
            hidden = decoder.forward(transaction.tokens, transaction.step)
            logits = decoder.logits(hidden)
        transaction.append(hidden, logits)     # token 17 is in the memory

    All of it under `torch.inference_mode()`. If that raises, the memories must be discarded, so
    they are successors or forks.

    step: a step of n tokens of one memory, or a GroupStep of one or some tokens of each.
    tokens: `[n]` int64 on the cache's device, those of each memory one after another.
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
        grouped: whether `step` is a GroupStep, for one token of each of any number of memories; or
            for several, if the decoder evaluates them as rows.
        """
        self._memories, self._chunks = memories, chunks
        self._cache_steps = ExitStack()
        steps = list[DecodeStep | ChunkStep]()
        for memory, chunk in zip(memories, chunks, strict=True):
            cache, count = memory.cache, len(chunk)
            if grouped and count > 1:
                steps += self._cache_steps.enter_context(row_steps(cache, count, sampled)).steps
            else:
                steps.append(self._cache_steps.enter_context(cache.step(count, sampled)))
        decode_steps = [step for step in steps if isinstance(step, DecodeStep)]
        self.step = GroupStep(decode_steps) if grouped else steps[0]
        ids = [token for chunk in chunks for token in chunk]
        device = memories[0].cache.layout.device
        self.tokens = torch.tensor(ids, dtype=torch.int64, device=device)

    def __enter__(self) -> "StepTransaction":
        return self

    def __exit__(self, *error: Any) -> None:
        """End the steps of the caches, which keep the cells unless the block raised."""
        self._cache_steps.__exit__(*error)

    def append(self, hidden: Tensor, logits: Tensor | None) -> list[Sequence[Compression]]:
        """Append the tokens to the memories; return what their policies compress for that.

        hidden: `[n, hidden_size]` of `tokens`. logits: `[memories, vocab]` of the last token of
        each memory; None to compute them when they are first needed. Both are finite.
        """
        compressions, end, last_logits = list[Sequence[Compression]](), 0, None
        for index, (memory, chunk) in enumerate(zip(self._memories, self._chunks, strict=True)):
            end += len(chunk)
            if logits is not None:
                last_logits = logits[index].clone() if len(logits) > 1 else logits[0]
            # Copied: the last row of one session must not keep those of all in memory.
            memory.append(chunk, hidden[end - 1 : end].clone(), last_logits)
            compressions.append(memory.policy.enforce_bounds(memory.cache))
        return compressions


@torch.inference_mode()
def append_sampled(memories: Sequence[Memory], tokens: Sequence[int], grouped: bool) -> None:
    """Evaluate a sampled token for each memory, all in one forward, and append it."""
    for memory in memories:
        memory.policy.open(memory.cache, 1)  # makes room for one cell
    decoder, chunks = memories[0].decoder, [[token] for token in tokens]
    with StepTransaction(memories, chunks, sampled=True, grouped=grouped) as transaction:
        hidden = decoder.forward(transaction.tokens, transaction.step)
        logits = decoder.logits(hidden)
    transaction.append(hidden, logits)


def evaluate(memory: Memory, ids: Sequence[int], prefill_step: int) -> Iterator[StepResult]:
    """Evaluate token ids into a memory, one step at each iteration."""
    done = 0
    while done < len(ids):
        result = evaluate_step(memory, ids, done, step_end(done, prefill_step))
        done += result.hidden.shape[0]
        yield result


def evaluate_all(
    memory: Memory,
    ids: Sequence[int],
    prefill_step: int,
    pinned: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Evaluate token ids into a memory, and pin them if `pinned`.

    A checkpoint is taken whenever a whole step has come since the newest one. progress: called
    after each step with the number of tokens in it.
    """
    for step in evaluate(memory, ids, prefill_step):
        if len(memory.tokens) - memory.checkpoints.newest_end >= prefill_step:
            take_checkpoint(memory)
        if progress:
            progress(step.hidden.shape[0])
    if pinned:
        memory.pin(len(memory.tokens) - len(ids), len(memory.tokens))


def step_end(done: int, prefill_step: int) -> int:
    """Return after how many tokens of a text a step ends that begins after `done` tokens.

    Steps end at multiples of `prefill_step`, whatever the policy made of those before, so that two
    prompts are evaluated in the same steps for as long as they are equal. With `prefill_step` 512
    and 300 tokens done, the next step is of 212.
    """
    return done - done % prefill_step + prefill_step


def evaluate_prompt_step(
    memory: Memory, ids: Sequence[int], done: int, end: int, sampled: bool = False
) -> StepResult:
    """Evaluate the next step of a prompt, and take the checkpoints before it and at its end.

    The arguments are those of `evaluate_step`. A checkpoint is taken before the prompt, which is
    the boundary of a message, and at `end`. Raises ContextFull if the rest of the prompt does not
    fit: the session may have got other tokens since the last step.
    """
    memory.require_room(len(ids) - done)
    if not done:
        take_checkpoint(memory)
    result = evaluate_step(memory, ids, done, end, sampled)
    if done + len(result.hidden) == end:
        take_checkpoint(memory)
    return result


@torch.inference_mode()
def evaluate_step(
    memory: Memory, ids: Sequence[int], done: int, end: int, sampled: bool = False
) -> StepResult:
    """Evaluate the next step of the ids, of which the first `done` are in the memory.

    end: after how many of the ids it ends at the latest. sampled: whether the model itself has
    chosen the ids; it is a step of one token then.
    """
    chunk = make_room_for_chunk(memory, ids, done, done + 1 if sampled else end)
    return evaluate_chunk(memory, chunk, is_last=done + len(chunk) == len(ids), sampled=sampled)


def make_room_for_chunk(memory: Memory, ids: Sequence[int], done: int, end: int) -> Sequence[int]:
    """Have the policy prepare the segment that takes the next step's cells; return its ids.

    done, end: see `evaluate_step`. The policy may end the step earlier.
    """
    max_size = min(len(ids), end) - done
    # Storage for an answer to a long prompt is reserved, or its first token would move all cells.
    reserved = MIN_GROWTH if len(ids) > MIN_GROWTH else 0
    step_size = memory.policy.open(memory.cache, max_size, len(ids) - done - max_size + reserved)
    return ids[done : done + step_size]


def evaluate_chunk(
    memory: Memory, chunk: Sequence[int], is_last: bool = False, sampled: bool = False
) -> StepResult:
    """Evaluate in one step the ids that `make_room_for_chunk` returned.

    is_last: whether to compute the last token's logits at once. sampled: see `evaluate_step`.
    """
    cells_before, count = memory.cache.cells, len(chunk)
    as_rows = 1 < count <= memory.decoder.executor.row_limit
    max_rows = row_capacity(memory.cache) if as_rows else count
    parts, compressions = list[Tensor](), list[Compression]()
    for first in range(0, count, max_rows):
        ids = chunk[first : first + max_rows]
        with StepTransaction([memory], [ids], sampled, grouped=as_rows) as transaction:
            last = is_last and first + len(ids) == count
            hidden, logits = _forward(memory.decoder, transaction.tokens, transaction.step, last)
        parts.append(hidden)
        compressions += transaction.append(hidden, logits)[0]
    peak_cells = cells_before + count if count > 1 else memory.cache.cells
    return StepResult(parts[0] if len(parts) == 1 else torch.cat(parts), peak_cells, compressions)


def _forward(
    decoder: Decoder, tokens: Tensor, step: AnyStep, is_last: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return `[n, hidden_size]`, and `[1, vocab]` logits if `is_last`. Raises NonFiniteLogits."""
    hidden = decoder.forward(tokens, step)
    if is_last:
        return hidden, decoder.logits(hidden[-1:])
    require_finite(hidden)
    return hidden, None


def evaluate_into_segment(
    decoder: Decoder, cache: KVCache, ids: Sequence[int], step_size: int
) -> Iterator[int]:
    """Evaluate tokens into a cache's newest segment, which has room; yield the size of each step.

    The cache is not used otherwise meanwhile.
    """
    for first in range(0, len(ids), step_size):
        step_ids = ids[first : first + step_size]
        with torch.inference_mode():
            tokens = torch.tensor(step_ids, dtype=torch.int64, device=cache.layout.device)
            if 1 < len(tokens) <= min(decoder.executor.row_limit, row_capacity(cache)):
                with row_steps(cache, len(tokens)) as rows:
                    _forward(decoder, tokens, GroupStep(rows.steps))
            else:
                with cache.step(len(tokens)) as step:
                    _forward(decoder, tokens, step)
        yield len(step_ids)
