"""Lossless speculation: several tokens from one forward, the same as one by one to the bit.

The rows of the forward are, for each session, a sampled token and a draft of those after it. Then
tokens are sampled from the rows' logits, by the session's own generator and in the usual order, for
as long as they are those of the draft. The cells and states of the others are taken back.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.row_steps import row_steps
from kvkeep.errors import InvalidArgument, NonFiniteLogits
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.answer_end import keep_answer_end, may_end_answer
from kvkeep.session.core import SessionCore, SessionState, session_transaction
from kvkeep.session.draft_source import DraftSource
from kvkeep.session.drafts import Acceptance, Draft, DraftCounts, DraftPlanner, Offer
from kvkeep.session.evaluation import append_sampled
from kvkeep.session.memory import Memory
from kvkeep.session.ngram_index import INDEXED_TOKENS
from kvkeep.session.sampler import Sampler
from kvkeep.session.sampling import Sampling
from kvkeep.session.stop_gate import ReasoningMarkers
from kvkeep.session.streaming import TextStream

_MAX_ROWS = 64  # of a forward, unless it has more sessions


@dataclass(frozen=True)
class SampledRun:
    """Tokens of a session from one forward, at least one, and what each was sampled from.

    logits: `[vocab]` float32 for each token. error: raised when the constraint or the check for the
    end followed them; the session has the tokens, and nothing more can be sampled.
    """

    tokens: Sequence[int]
    logits: Sequence[Tensor]
    error: Exception | None = None

    def require_followed(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error


class Speculation:
    """The drafts of one generation of a session, counted in its core's `drafts`."""

    def __init__(
        self,
        core: SessionCore,
        sampling: Sampling,
        ends_after: Callable[[int], bool],
        drafts: bool = True,
    ):
        """ends_after: whether generation ends after a token; called once for each, in order.
        drafts: whether to try any tokens; the only other effect is on `Acceptance.pace`."""
        self.core, self.sampling = core, sampling
        self.acceptance = Acceptance()
        self.counts = core.drafts = DraftCounts()
        # Whether a step failed after the constraint had followed tokens of it, and cannot go back.
        # The session does not have these, so that no further token can be sampled.
        self.has_lost_step = False
        self._ends_after, self._drafts = ends_after, drafts
        self._source: DraftSource | None = None
        self._indexed_tokens = core.memory.tokens
        self._new_tokens = list[int]()  # that the source has not taken yet
        self._fruitless_steps = 0  # since a draft was accepted

    def draft(self, first: int, max_tokens: int, looks: bool = True) -> Draft | None:
        """Return a draft of the tokens after `first`, which is sampled.

        max_tokens: with it. looks: whether to look for one; see `DraftPlanner.looks`.
        """
        memory = self.core.memory
        if memory.tokens is not self._indexed_tokens:  # the session was changed meanwhile
            self._source = None
        if not (looks and self._drafts) or min(max_tokens, memory.decoder.executor.row_limit) < 2:
            return None
        if self._source is None:
            self._source = DraftSource(memory.tokens.last(INDEXED_TOKENS))
        else:
            self._source.extend(self._new_tokens)
        self._new_tokens.clear()
        if (found := self._source.draft(first, _MAX_ROWS)) is None:
            return None
        limit = _row_limit(memory, max_tokens) - 1  # counts cells: only where there is a draft
        tokens = self._without_answer_end(found.tokens[: max(0, limit)])
        return Draft(tokens, found.matched) if tokens else None

    def accept(self, state: SessionState, rows: Sequence[int], logits: Tensor) -> int:
        """Sample after each row for as long as the next one is sampled; return how many rows are.

        rows: the first one is sampled. logits: `[rows, vocab]`. The state's sampler is left as it
        is after the last of them.
        """
        self.has_lost_step = self.sampling.constraint is not None
        window = max(1, self.sampling.repetition_window)
        recent_tokens = state.memory.tokens.last(window)
        for count, token in enumerate(rows[:-1], 1):
            recent_tokens.append(token)
            if self.follow(token):
                return count
            sampler = state.sampler
            if self.sampling.temperature:  # a draw that is not taken must not advance it
                sampler = Sampler.from_state(sampler.state())
            try:
                suppressed = self.core.model.suppressed_tokens
                sampled = sampler.sample(
                    logits[count - 1], recent_tokens, self.sampling, suppressed
                )
            except Exception:  # raised again when this token is sampled next time
                return count
            if sampled != rows[count]:
                return count
            state.sampler = sampler
        self.follow(rows[-1])
        return len(rows)

    def replace_end_check(self, ends_after: Callable[[int], bool]) -> None:
        """Go on with another check for the end, after a step that failed.

        ends_after: has followed the tokens that the session has, and none of the step's.
        """
        self._ends_after = ends_after

    def follow(self, token: int) -> bool:
        """Let the constraint follow a sampled token; return whether generation ends after it."""
        if self.sampling.constraint is not None:
            self.sampling.constraint.accept(token)
        return self._ends_after(token) or self.sampling.complete

    def learn(self, draft: Draft | None, tried: int, tokens: Sequence[int], cost: float) -> None:
        """Take the tokens of a step, which the session has appended.

        tried: of the draft. cost: of a row, relative to a forward of one.
        """
        self.has_lost_step = False
        if self._source is not None:
            self._new_tokens += tokens
            self._indexed_tokens = self.core.memory.tokens
        accepted, counts = len(tokens) - 1, self.counts
        self._fruitless_steps = 0 if accepted else self._fruitless_steps + 1
        self.acceptance.learn(draft, tried, accepted, cost)
        if tried:
            self.counts = DraftCounts(counts.drafted + tried, counts.accepted + accepted)
            self.core.drafts = self.counts

    @property
    def fruitless_steps(self) -> int | None:
        """Steps since a draft was accepted; None if no drafts are tried."""
        return self._fruitless_steps if self._drafts else None

    def _without_answer_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens before one with which an answer may end, if layers keep states.

        Such a token is the first of its forward, so that the states before it can be kept.
        """
        model, stop = self.core.model, self.sampling.stop
        if not model.spec.keeps_states:
            return tokens
        text, ends = model.text, model.end_token_ids
        return list(takewhile(lambda token: not may_end_answer(text, token, ends, stop), tokens))


def end_check(
    core: SessionCore,
    stop: tuple[str, ...],
    end_ids: Sequence[int],
    reasoning: ReasoningMarkers | None = None,
    context: Sequence[int] | None = None,
    generated: Sequence[int] = (),
) -> Callable[[int], bool]:
    """Return a function that tells whether a generation ends after a token, called for each.

    reasoning: as of `TextStream`. context: the tokens before the generation; None for all of the
    session. generated: tokens that did not end it.
    """
    before = core.memory.tokens if context is None else context
    stream = TextStream(core.model.text, stop, before, reasoning)

    def ends_after(token: int) -> bool:
        if stop and token not in end_ids:
            stream.push(token)
        return token in end_ids or stream.stopped

    for token in generated:
        ends_after(token)
    return ends_after


@computes_in_worker
def sample_runs(
    speculations: Sequence[Speculation], max_tokens: Sequence[int], planner: DraftPlanner
) -> list[SampledRun]:
    """Sample tokens for several sessions of a model, and append all of them by one forward.

    max_tokens: the most for each session. A call that fails changes none of them; a run may have
    an error of its own. Raises as `Session.next_token`.
    """
    try:
        return _sample_runs(speculations, max_tokens, planner)
    except NonFiniteLogits:  # perhaps only after tokens that would not have been sampled
        return _sample_runs(speculations, [1] * len(speculations), planner)


def _sample_runs(
    speculations: Sequence[Speculation], max_tokens: Sequence[int], planner: DraftPlanner
) -> list[SampledRun]:
    all_logits = [_logits(speculation.core) for speculation in speculations]
    with session_transaction([speculation.core for speculation in speculations]) as states:
        members = list(zip(speculations, states, strict=True))
        sampled = zip(members, all_logits, strict=True)
        firsts = [
            state.sample(logits, each.sampling, each.core.model.suppressed_tokens)
            for (each, state), logits in sampled
        ]
        wanted = zip(speculations, firsts, max_tokens, strict=True)
        looks = planner.looks([each.fruitless_steps for each in speculations])
        drafts = [each.draft(first, limit, looks) for each, first, limit in wanted]
        rows: Sequence[list[int]] = [[first] for first in firsts]
        if any(drafts):
            offers = [Offer(d, s.acceptance) for s, d in zip(speculations, drafts, strict=True)]
            lengths = planner.choose(offers, max(0, _MAX_ROWS - len(offers)))
            for row, draft, length in zip(rows, drafts, lengths, strict=True):
                row += draft.tokens[:length] if draft else ()
        for (each, state), first in zip(members, firsts, strict=True):
            model, stop = each.core.model, each.sampling.stop
            keep_answer_end(state.memory, model.text, first, model.end_token_ids, stop)
        started = time.perf_counter()
        if all(len(row) == 1 for row in rows):
            append_sampled([state.memory for state in states], firsts, grouped=len(states) > 1)
            tried: Sequence[Sequence[int]] = rows
            runs = [SampledRun(*run) for run in zip(rows, zip(all_logits), strict=True)]
        else:
            tried, runs = _evaluate(members, rows, all_logits)
        seconds = time.perf_counter() - started
    if looks:
        num_rows = sum(map(len, tried))
        acceptances = [each.acceptance for each in speculations]
        planner.learn(acceptances, num_rows, num_rows - len(tried), seconds)
    cost = planner.cost.value
    for index, (each, draft, chunk) in enumerate(zip(speculations, drafts, tried, strict=True)):
        tokens = runs[index].tokens
        if len(chunk) == 1:  # otherwise it has been followed already
            try:
                each.follow(tokens[0])
            except Exception as error:  # the other sessions have their tokens
                runs[index] = replace(runs[index], error=error)
        each.learn(draft, len(chunk) - 1, tokens, cost)
    return runs


def _logits(core: SessionCore) -> Tensor:
    """Return the logits of a session's last token. Raises if no token can be sampled."""
    if (logits := core.memory.logits()) is None:
        raise InvalidArgument("nothing to continue: feed a prompt first")
    core.memory.require_room(1)
    return logits


@torch.inference_mode()
def _evaluate(
    members: Sequence[tuple[Speculation, SessionState]],
    rows: Sequence[Sequence[int]],
    all_logits: Sequence[Tensor],
) -> tuple[Sequence[Sequence[int]], list[SampledRun]]:
    """Evaluate for each session a sampled token and a draft, and append what is sampled.

    Returns the rows that were evaluated, which may be fewer, and the sampled tokens.
    """
    memories = [state.memory for _, state in members]
    pairs = zip(memories, rows, strict=True)
    rows = [chunk[: each.policy.open(each.cache, len(chunk))] for each, chunk in pairs]
    decoder, device = memories[0].decoder, memories[0].cache.layout.device
    ids = torch.tensor([t for chunk in rows for t in chunk], dtype=torch.int64, device=device)
    runs, ends = list[SampledRun](), [0, *accumulate(map(len, rows))]
    with ExitStack() as stack:
        all_steps = [
            stack.enter_context(row_steps(each.cache, len(chunk), True, revertible=len(chunk) > 1))
            for each, chunk in zip(memories, rows, strict=True)
        ]
        hidden = decoder.forward(
            ids, GroupStep([step for each in all_steps for step in each.steps])
        )
        logits = decoder.logits(hidden)
        for index, ((speculation, state), chunk) in enumerate(zip(members, rows, strict=True)):
            own_logits = logits[ends[index] : ends[index + 1]]
            count = speculation.accept(state, chunk, own_logits) if len(chunk) > 1 else 1
            if len(chunk) > 1:
                all_steps[index].keep(count)
            runs.append(SampledRun(chunk[:count], [all_logits[index], *own_logits[: count - 1]]))
    for start, memory, run in zip(ends, memories, runs, strict=False):
        last = start + len(run.tokens) - 1
        # Copied: the last row must not keep those of the others in memory.
        memory.append(run.tokens, hidden[last : last + 1].clone(), logits[last].clone())
        memory.policy.enforce_bounds(memory.cache)
    return rows, runs


def _row_limit(memory: Memory, max_tokens: int) -> int:
    """Return how many tokens the next forward may take."""
    cache = memory.cache
    limits = [max_tokens, memory.decoder.executor.row_limit, memory.policy.window_limit(cache)]
    if (room := memory.policy.room(cache)) is not None:
        limits.append(room)
    if cache.local_cache is not None and cache.local_cache.window.capacity is not None:
        limits.append(cache.local_cache.window.capacity)
    return min(limits)
