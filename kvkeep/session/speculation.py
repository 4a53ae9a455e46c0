"""Lossless speculation: several tokens from one forward, the same as one by one to the bit.

The rows of the forward are a sampled token and a draft of those after it. Then tokens are sampled
from the rows' logits, by the session's own generator and in the usual order, for as long as they
are those of the draft. The cells and states of the others are taken back.
"""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from kvkeep.cache.group_step import GroupStep
from kvkeep.errors import InvalidArgument, NonFiniteLogits
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.answer_end import keep_answer_end, may_end_answer
from kvkeep.session.core import SessionCore, SessionState, session_transaction
from kvkeep.session.drafts import DraftCounts, DraftLength, NgramIndex
from kvkeep.session.evaluation import StepTransaction
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampler, Sampling


class Speculation:
    """The speculation of one stream of tokens of a session, counted in its core's `drafts`."""

    def __init__(self, core: SessionCore, sampling: Sampling, ends_after: Callable[[int], bool]):
        """ends_after: whether generation ends after a token; called once for each, in order."""
        self._core, self._sampling, self._ends_after = core, sampling, ends_after
        self._index, self._indexed_tokens = NgramIndex(), core.memory.tokens
        self._index.extend(self._indexed_tokens)
        self._length = DraftLength()

    @computes_in_worker
    def next_tokens(self, max_tokens: int) -> list[int]:
        """Sample at least one token and at most `max_tokens`, append them, and return them.

        Raises as `Session.next_token`; a call that fails changes nothing.
        """
        try:
            return self._next_tokens(max_tokens)
        except NonFiniteLogits:  # perhaps only after tokens that would not have been sampled
            return self._next_tokens(1)

    def _next_tokens(self, max_tokens: int) -> list[int]:
        core, sampling = self._core, self._sampling
        if (logits := core.memory.logits()) is None:
            raise InvalidArgument("nothing to continue: feed a prompt first")
        core.memory.require_room(1)
        if core.memory.tokens is not self._indexed_tokens:  # the session was changed meanwhile
            self._index = NgramIndex(core.memory.tokens)
        max_drafted = _row_limit(core.memory, max_tokens) - 1
        with session_transaction([core]) as (state,):
            first = state.sample(logits, sampling)
            draft = self._index.draft(first, max_drafted) if max_drafted > 0 else None
            length = self._length.choose(draft) if draft else 0
            drafted = self._without_answer_end(draft.tokens[:length]) if draft else []
            self._keep_answer_end(state, first)
            started = time.perf_counter()
            tokens, tried = self._evaluate(state, [first, *drafted])
            seconds = time.perf_counter() - started
        if not tried:  # otherwise it has been followed already
            self._follow(first)
        self._index.extend(tokens)
        self._indexed_tokens = core.memory.tokens
        self._length.learn_cost(1 + tried, seconds)
        if draft and tried:
            self._length.learn(draft, tried, len(tokens) - 1)
        counts = core.drafts
        core.drafts = DraftCounts(counts.drafted + tried, counts.accepted + len(tokens) - 1)
        return tokens

    def _keep_answer_end(self, state: SessionState, token: int) -> None:
        model = self._core.model
        stop = self._sampling.stop
        keep_answer_end(state.memory, model.text, token, model.end_token_ids, stop)

    def _without_answer_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before one with which an answer may end, if layers keep states.

        Such a token is the first of its forward, so that the states before it can be kept.
        """
        model, stop = self._core.model, self._sampling.stop
        if not model.spec.keeps_states:
            return list(tokens)
        text, ends = model.text, model.end_token_ids
        return list(takewhile(lambda token: not may_end_answer(text, token, ends, stop), tokens))

    @torch.inference_mode()
    def _evaluate(self, state: SessionState, rows: list[int]) -> tuple[list[int], int]:
        """Evaluate a sampled token and a draft; return what is sampled, and how many were tried."""
        memory = state.memory
        rows = rows[: memory.policy.open(memory.cache, len(rows))]
        decoder = memory.decoder
        if len(rows) == 1:
            with StepTransaction([memory], [rows], sampled=True) as transaction:
                hidden = decoder.forward(transaction.tokens, transaction.step)
                logits = decoder.logits(hidden)
            transaction.append(hidden, logits)
            return rows, 0
        ids = torch.tensor(rows, dtype=torch.int64, device=memory.cache.layout.device)
        with memory.cache.row_steps(len(rows), sampled=True, revertible=True) as row_steps:
            hidden = decoder.forward(ids, GroupStep(row_steps.steps))
            logits = decoder.logits(hidden)
            count = self._accept(state, rows, logits)
            row_steps.keep(count)
        # Copied: the last row must not keep those of the others in memory.
        memory.append(rows[:count], hidden[count - 1 : count].clone(), logits[count - 1].clone())
        memory.policy.enforce_bounds(memory.cache)
        return rows[:count], len(rows) - 1

    def _accept(self, state: SessionState, rows: Sequence[int], logits: Tensor) -> int:
        """Sample after each row for as long as the next one is sampled; return how many rows are.

        rows: the first one is sampled. logits: `[rows, vocab]`. The state's sampler is left as it
        is after the last of them.
        """
        window = max(1, self._sampling.repetition_window)
        recent_tokens = list(state.memory.tokens[-window:])
        for count, token in enumerate(rows[:-1], 1):
            recent_tokens.append(token)
            if self._follow(token):
                return count
            sampler = state.sampler
            if self._sampling.temperature:  # a draw that is not taken must not advance it
                sampler = Sampler.from_state(sampler.state())
            try:
                sampled = sampler.sample(logits[count - 1], recent_tokens, self._sampling)
            except Exception:  # raised again when this token is sampled next time
                return count
            if sampled != rows[count]:
                return count
            state.sampler = sampler
        self._follow(rows[-1])
        return len(rows)

    def _follow(self, token: int) -> bool:
        """Let the constraint follow a sampled token; return whether generation ends after it."""
        if self._sampling.constraint is not None:
            self._sampling.constraint.accept(token)
        return self._ends_after(token) or self._sampling.complete


def _row_limit(memory: Memory, max_tokens: int) -> int:
    """Return how many tokens the next forward may take."""
    cache = memory.cache
    limits = [max_tokens, memory.decoder.executor.row_limit, memory.policy.window_limit(cache)]
    if (room := memory.policy.room(cache)) is not None:
        limits.append(room)
    if cache.local_cache is not None and cache.local_cache.window.capacity is not None:
        limits.append(cache.local_cache.window.capacity)
    return min(limits)
