"""A generation: a request in progress."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.request import (
    EndReason,
    Failed,
    Finished,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
    Listener,
    PrefillProgress,
    TokenLogprob,
)
from kvkeep.engine.steps import StepGrid, prefill_step_at
from kvkeep.engine.usage import Reuse, Usage
from kvkeep.errors import Cancelled
from kvkeep.session.aligning import AlignedFeeding
from kvkeep.session.drafts import DraftCounts
from kvkeep.session.evaluation import step_end
from kvkeep.session.feeding import Feeding
from kvkeep.session.scoring import TokenScores
from kvkeep.session.speculation import SampledRun, Speculation, end_check
from kvkeep.session.streaming import TextStream

# "waiting": until another generation has prefilled the prompt that they share.
Phase = Literal["waiting", "prefill", "decode", "done"]

_MIN_LOGPROB = -9999.0
_generation_numbers = itertools.count(1)


class Generation(Iterator[GenerationEvent]):
    """An admitted request. Iterating waits for events, up to `Finished`, or raises its error."""

    def __init__(
        self, request: GenerationRequest, record: SessionRecord, listener: Listener | None = None
    ):
        """listener: called in the engine's thread with each event, and must not block; iterating
        then yields nothing."""
        self.number = next(_generation_numbers)  # in the order of submission
        self.request, self.record = request, record
        self.phase: Phase = "waiting"
        self.reuse = Reuse()
        self.cancelled = False  # `cancel` was called
        self.error: BaseException | None = None
        self.end_reason = ""  # "failed" for an error, "" before the end
        self.generated: list[int] = []  # token ids
        self._held = 0  # cells of the session when it started
        self.unprefilled_tokens = 0  # prompt tokens that were not prefilled when it ended
        self.waited_tokens = 0  # tokens that were prefilled for other prompts while this one waited
        self._feeding: Feeding | AlignedFeeding | None = None
        self._step_aligned = False  # all tokens so far were evaluated in whole prefill steps
        self._text: Sequence[int] = ()  # with the whole prompt, if it is evaluated in whole steps
        self._logprobs: Tensor | None = None  # `[vocab]`, of the newest token, if requested
        self._speculation: Speculation | None = None
        self._context: Sequence[int] = ()  # the session's tokens when decoding begins
        self._end_token: GeneratedToken | None = None
        self._submit_time = time.perf_counter()
        self._prefill_start: float | None = None
        self._prefill_end: float | None = None
        self._events: SimpleQueue[GenerationEvent] = SimpleQueue()
        self._exhausted = listener is not None  # which gets all events
        self._end_event: Finished | Failed | None = None  # that was not reported yet
        self._listener = listener or self._events.put

    # For the caller

    def cancel(self) -> None:
        """End it after the current token. The generated tokens stay in the session."""
        self.cancelled = True

    def __next__(self) -> GenerationEvent:
        if self._exhausted:
            raise StopIteration
        event = self._events.get()
        self._exhausted = isinstance(event, (Finished, Failed))
        if isinstance(event, Failed):
            raise event.error
        return event

    def text(self) -> str:
        """Wait for the end and return all of the text. Raises the generation's error."""
        return "".join(e.text for e in self if isinstance(e, (GeneratedToken, Finished)))

    # For the engine, in its thread

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens that are not evaluated yet."""
        return self._feeding.total - self._feeding.done if self._feeding else 0

    def start(self, feeding: Feeding | AlignedFeeding | None, reuse: Reuse) -> None:
        """Begin with the prefill of `feeding`; None if there is nothing to prefill."""
        self._feeding, self.reuse, self._held = feeding, reuse, self.record.live.cache.cells
        self.phase = "prefill"
        tokens = self.record.live.tokens
        is_exact = not isinstance(feeding, AlignedFeeding)
        self._step_aligned = is_exact and self.record.step_aligned_tokens == len(tokens)
        if self._step_aligned:
            self._text = [*tokens, *self.request.prompt[reuse.tokens :]]
        if feeding is None:
            self._begin_decode()
            self._prefill_start = self._prefill_end
        if feeding is not None or reuse.tokens:
            self._emit_progress()

    @property
    def is_waiting(self) -> bool:
        """Whether its prefill has not begun."""
        return self.phase in ("waiting", "prefill") and self._prefill_start is None

    @property
    def needs_lookup(self) -> bool:
        """Whether its prompt is to be looked up in the prefix cache before its first step."""
        return isinstance(self._feeding, Feeding) and self._feeding.needs_lookup

    def begin_lookup(self) -> Callable[[], None]:
        """Return the lookup of its prompt, for another thread. It is a part of the prefill."""
        assert isinstance(self._feeding, Feeding)
        self._prefill_start = time.perf_counter()
        return self._feeding.lookup()

    def prefill_next_step(self) -> None:
        """Evaluate a prefill step of the prompt, or load its prefix that a lookup has found."""
        assert self._feeding is not None
        if self._prefill_start is None:
            self._prefill_start = time.perf_counter()
        session = self.record.live
        step = self._feeding.step(self._next_step_end(self._feeding))
        if step.reused:
            self.reuse = replace(self.reuse, tokens=self.reuse.tokens + step.tokens, source="store")
        if self._step_aligned:
            self.record.step_aligned_tokens = self.record.end_of_last_step(len(session.tokens))
        self._emit_progress(step.scores)
        if not self.prefill_remaining:
            self._feeding, self._text = None, ()
            self._begin_decode()

    def _begin_decode(self) -> None:
        self.phase, self._context = "decode", self.record.live.tokens
        self._prefill_end = time.perf_counter()

    def _next_step_end(self, feeding: Feeding | AlignedFeeding) -> int:
        """Return after how many tokens of a prompt its next step ends."""
        session, done = self.record.live, feeding.done
        if self._step_aligned:
            start = len(session.tokens)
            return done + StepGrid.of(session).next_end(self._text, start) - start
        # Nothing reuses single steps of this session, so that the fewest are the best.
        return step_end(done, prefill_step_at(session.prefill_step, len(session.tokens)))

    def check_can_decode(self) -> bool:
        """Return whether another token may be generated; end the generation if not."""
        if self.request.max_tokens == len(self.generated):
            self.finish("length")
        elif (room := self.record.live.room) is not None and room <= 0:
            self.finish("full")
        return self.phase == "decode"

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be generated."""
        limit = self.request.max_tokens
        return sys.maxsize if limit is None else limit - len(self.generated)

    def speculation(self, default: bool) -> Speculation:
        """Return its drafts. default: whether to try any if the request does not say."""
        if self._speculation is None:
            request, core = self.request, self.record.live.core
            tries_drafts = default if request.speculate is None else request.speculate
            ends_after = self._new_end_check()
            self._speculation = Speculation(core, request.sampling, ends_after, tries_drafts)
        return self._speculation

    def forget_failed_step(self) -> None:
        """Have the check for stop strings follow the session's tokens alone, to sample again."""
        if self._speculation is not None and self.request.sampling.stop:
            self._speculation.replace_end_check(self._new_end_check())

    def _new_end_check(self) -> Callable[[int], bool]:
        sampling, core = self.request.sampling, self.record.live.core
        before, so_far = self._context, self.generated
        return end_check(core, sampling.stop, self._end_tokens, sampling.reasoning, before, so_far)

    def add_run(self, run: SampledRun) -> None:
        """Report sampled tokens, and end the generation after the last one if it is complete."""
        for index, (token, logits) in enumerate(zip(run.tokens, run.logits, strict=True), 1):
            if self.request.logprobs is not None:
                self._logprobs = torch.log_softmax(logits.float().cpu(), -1)
            self._add_token(token, is_last=index == len(run.tokens))

    @property
    def _end_tokens(self) -> tuple[int, ...]:
        """The tokens that end it."""
        if self.request.ignore_eos:
            return ()
        return (*self.record.live.core.model.end_token_ids, *self.request.end_tokens)

    def _add_token(self, token: int, is_last: bool) -> None:
        """Report a token. is_last: whether its constraint, if any, has followed no later one."""
        self.generated.append(token)
        request = self.request
        if token in self._end_tokens:
            self._end_token = GeneratedToken(token, "", *self._reported_logprobs(token))
            self.finish("eos")
            return
        stream = self._text_stream
        pieces = stream.push_pieces(token)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        self._emit(GeneratedToken(token, text, *self._reported_logprobs(token), pieces))
        if stream.stopped:
            self.finish("stop")
        elif is_last and request.sampling.complete:  # its grammar allows no further token
            self.finish("eos")
        elif len(self.generated) == request.max_tokens:
            self.finish("length")

    @property
    def withheld_tokens(self) -> int:
        """The number of last tokens withheld from its caller: an end token, or a stop string's."""
        if self.end_reason not in ("eos", "stop"):
            return 0
        return self._text_stream.withheld_tokens + (self._end_token is not None)

    def finish(self, reason: EndReason) -> None:
        """End with `Finished`. A stop string in text that was held back overrides the reason.

        Here and for `fail`, `report_end` reports it.
        """
        stream = self._text_stream
        held_back_text = stream.flush()
        reason = "stop" if stream.stopped else reason
        usage = replace(self.usage, evicted=self._count_evicted())
        finished = Finished(reason, held_back_text, usage, stream.matched_stop, self._end_token)
        self._end(finished, reason)

    def report_end(self) -> None:
        """Report how it ended, once its session is idle and has its next revision."""
        event, self._end_event = self._end_event, None
        if isinstance(event, Finished):
            session = self.record.session
            total_tokens = len(session.tokens) if session else 0
            event = replace(event, total_tokens=total_tokens, revision=self.record.revision)
        if event is not None:
            self._emit(event)

    def fail(self, error: BaseException) -> None:
        """End with `Failed`."""
        self.error = self.error or error
        self._end(Failed(error), "cancelled" if isinstance(error, Cancelled) else "failed")

    def fail_as_cancelled(self) -> None:
        self.fail(Cancelled("the generation was cancelled"))

    @property
    def usage(self) -> Usage:
        """The tokens and the time that it took so far."""
        now = time.perf_counter()
        prefill_start = now if self._prefill_start is None else self._prefill_start
        prefill_end = now if self._prefill_end is None else self._prefill_end
        return Usage(
            len(self.request.prompt),
            len(self.generated),
            self.reuse,
            max(0.0, prefill_start - self._submit_time),
            max(0.0, prefill_end - prefill_start),
            max(0.0, now - prefill_end),
            held=self._held,
            prompt_written=self.request.written_tokens,
            drafts=self._speculation.counts if self._speculation else DraftCounts(),
        )

    def _count_evicted(self) -> int:
        session = self.record.live
        cache, num_tokens = session.cache, len(session.tokens)
        if cache.cells >= num_tokens or cache.recurrent_states:
            return 0
        return session.token_status[: num_tokens - len(self.generated)].count("forgotten")

    def _end(self, event: Finished | Failed, reason: str) -> None:
        if self.phase != "done":
            self.phase, self.end_reason = "done", reason
            self.unprefilled_tokens, self._feeding = self.prefill_remaining, None
            self._end_event = event

    def _emit(self, event: GenerationEvent) -> None:
        try:
            self._listener(event)
        except Exception:  # the listener is gone; other generations must not suffer from it
            self.cancelled = True

    def _emit_progress(self, scores: TokenScores | None = None) -> None:
        total = len(self.request.prompt)
        done, seconds = total - self.prefill_remaining, time.perf_counter() - self._submit_time
        self._emit(PrefillProgress(done, total, self.reuse, seconds, scores))

    def _reported_logprobs(self, token: int) -> tuple[TokenLogprob | None, Sequence[TokenLogprob]]:
        """Return the log-probabilities of a sampled token and of the most likely tokens."""
        logprobs = self._logprobs
        if logprobs is None:
            return None, ()
        value = float(logprobs[token])  # JSON cannot express minus infinity
        logprob = TokenLogprob(token, value if math.isfinite(value) else _MIN_LOGPROB)
        values, ids = logprobs.topk(min(self.request.logprobs or 0, logprobs.shape[0]))
        return logprob, list(map(TokenLogprob, ids.tolist(), values.tolist()))

    @cached_property
    def _text_stream(self) -> TextStream:
        """Decodes the generated tokens to text, and finds stop strings in it."""
        codec = self.record.live.core.model.text
        sampling = self.request.sampling
        return TextStream(codec, sampling.stop, self._context, sampling.reasoning)
