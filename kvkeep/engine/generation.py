"""An answer on its way: what was asked, how far it is, and who listens."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.engine.events import (
    Failed,
    Finished,
    GeneratedToken,
    GenerationEvent,
    PrefillProgress,
    Reason,
    Reuse,
    TokenLogprob,
    Usage,
)
from kvkeep.engine.record import SessionRecord, prefill_step_at
from kvkeep.errors import Cancelled, InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.feeding import Feeding
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import GREEDY, Session
from kvkeep.session.streaming import TextStream

_numbers = itertools.count(1)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to take in and tokens to write after it; either may be nothing.

    prompt: token ids. max_tokens: at most so many are written; None for no end but the model's own.
    logprobs: of how many of the likeliest tokens the probabilities are told, 0 for the written one
        alone; None for none.
    priority: greater is sooner. A prompt that waits gains on those that came later.
    on_end: is called in the engine's thread with the session, how many tokens of the prompt were
        read and how many written, once the answer is over, however it ended.
    """

    prompt: tuple[int, ...] = ()
    max_tokens: int | None = None
    sampling: Sampling = GREEDY
    ignore_eos: bool = False
    logprobs: int | None = None
    priority: int = 0
    on_end: Callable[[Session, int, int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        validation.optional_whole("max_tokens", self.max_tokens, 0)
        validation.instance("sampling", self.sampling, Sampling)
        validation.optional_whole("logprobs", self.logprobs, 0)
        validation.whole("priority", self.priority)
        if not self.prompt and self.max_tokens == 0:
            raise InvalidArgument("nothing is asked for: no prompt, and no tokens")


class Generation(Iterator[GenerationEvent]):
    """What an engine makes of a request. Iterating gives its events as they come, in any thread.

    The last event is `Finished`, or an error is raised. `cancel` ends it after the current token.
    """

    def __init__(
        self,
        ask: GenerationRequest,
        kept: SessionRecord,
        codec: TextCodec,
        listener: Callable[[GenerationEvent], None] | None = None,
    ):
        """listener: is told each event in the engine's thread, which it must not keep; then
        nothing is to be had by iterating."""
        self.number = next(_numbers)
        self.ask, self.kept, self._codec = ask, kept, codec
        self.reuse = Reuse()
        self.feeding: Feeding | None = None
        self.begun = time.perf_counter()
        self.cancelled = False
        self.over = False
        self._given_all = False
        self.error: BaseException | None = None
        self.ended = ""  # how
        self.unread = 0  # tokens of the prompt, when it ended
        self.written: list[int] = []
        self.aged = 0  # tokens that were evaluated for others while it waited
        self._in_step = False
        self._moments: dict[str, float] = {}
        self._text: TextStream | None = None
        self._events: SimpleQueue[GenerationEvent] = SimpleQueue()
        self._listener = listener or self._events.put

    # For those who asked

    def cancel(self) -> None:
        """Nobody wants the rest. What is written by now stays in the session."""
        self.cancelled = True

    def __next__(self) -> GenerationEvent:
        if self._given_all:
            raise StopIteration
        event = self._events.get()
        self._given_all = isinstance(event, (Finished, Failed))
        if isinstance(event, Failed):
            raise event.error
        return event

    def text(self) -> str:
        """All of the text, once it is there. Raises what the answer failed with."""
        return "".join(e.text for e in self if isinstance(e, (GeneratedToken, Finished)))

    # For the engine, in its thread

    @property
    def prefill_remaining(self) -> int:
        """Tokens of the prompt that are still to be evaluated."""
        return self.feeding.total - self.feeding.done if self.feeding else 0

    @property
    def writes(self) -> bool:
        """Whether it is to write the next token."""
        return self.feeding is None and not self.over

    def start(self, feeding: Feeding | None, reuse: Reuse) -> None:
        """feeding: of what is to be evaluated; None where nothing is."""
        self.feeding, self.reuse = feeding, reuse
        # Steps then end at multiples of the prefill step, as those of any prompt that begins so.
        self._in_step = self.kept.evaluated == len(self.kept.live.tokens)
        if feeding is None:
            self._moments["first step"] = self._moments["read"] = time.perf_counter()
        if feeding is not None or reuse.tokens:
            self._tell_read()

    def read(self) -> None:
        """Takes one step of the prompt."""
        assert self.feeding is not None
        self._mark("first step")
        session = self.kept.live
        step = self.feeding.step(prefill_step_at(session.prefill_step, len(session.tokens)))
        if step.reused:
            self.reuse = Reuse(
                self.reuse.tokens + step.tokens,
                "store",
                self.reuse.reason,
                self.reuse.differs_at,
                self.reuse.session,
            )
        if self._in_step:
            self.kept.evaluated = self.kept.whole_steps(len(self.kept.live.tokens))
        self._tell_read()
        if not self.prefill_remaining:
            self.feeding = None
            self._mark("read")

    def likely_of(self, logits: Tensor) -> tuple[Tensor, Sequence[TokenLogprob]]:
        """The logs of all probabilities, and the likeliest as asked for. logits: `[vocab]`."""
        logs = torch.log_softmax(logits.float().cpu(), -1)
        count = min(self.ask.logprobs or 0, logs.shape[0])
        values, ids = logs.topk(count)
        return logs, [
            TokenLogprob(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    def wrote(
        self, token: int, ends: Sequence[int], logs: Tensor | None, top: Sequence[TokenLogprob]
    ) -> None:
        """The session has taken in that token. ends: ids that end a text."""
        self.written.append(token)
        likely = None if logs is None else TokenLogprob(token, _floored(float(logs[token])))
        if token in ends and not self.ask.ignore_eos:
            self.finish("eos")
            return
        stream = self._stream()
        text = "".join(stream.push(token))
        self._tell(GeneratedToken(token, text, likely, top))
        if stream.stopped:
            self.finish("stop")
        elif self.ask.sampling.complete:
            self.finish("eos")
        elif len(self.written) == self.ask.max_tokens:
            self.finish("length")

    def finish(self, reason: Reason) -> None:
        stream = self._stream()
        rest = "".join(stream.flush())
        reason = "stop" if stream.stopped else reason
        self._end(Finished(reason, rest, self.usage, stream.found))

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._end(Failed(error))

    def dismiss(self) -> None:
        """Ends it because it was cancelled."""
        self.fail(Cancelled("the answer was cancelled"))

    @property
    def usage(self) -> Usage:
        now = time.perf_counter()
        first = self._moments.get("first step", now)
        read = self._moments.get("read", now)
        return Usage(
            len(self.ask.prompt),
            len(self.written),
            self.reuse,
            max(0.0, first - self.begun),
            max(0.0, read - first),
            max(0.0, now - read),
        )

    def _end(self, event: Finished | Failed) -> None:
        if not self.over:
            self.over, self.unread = True, self.prefill_remaining
            self.ended = event.reason if isinstance(event, Finished) else _how(event.error)
            self.feeding = None
            self._tell(event)

    def _tell(self, event: GenerationEvent) -> None:
        try:
            self._listener(event)
        except Exception:  # who listens is gone: others must not suffer from it
            self.cancelled = True

    def _tell_read(self) -> None:
        total = len(self.ask.prompt)
        self._tell(
            PrefillProgress(
                total - self.prefill_remaining, total, self.reuse, time.perf_counter() - self.begun
            )
        )

    def _mark(self, what: str) -> None:
        self._moments.setdefault(what, time.perf_counter())

    def _stream(self) -> TextStream:
        if self._text is None:
            session = self.kept.live
            before = session.tokens.first(len(session.tokens) - len(self.written))
            self._text = TextStream(self._codec, self.ask.sampling.stop, before)
        return self._text


def _how(error: BaseException) -> str:
    return "cancelled" if isinstance(error, Cancelled) else "failed"


def _floored(value: float) -> float:
    """As JSON can say it: what cannot come has the least logarithm that people use."""
    return value if math.isfinite(value) else -9999.0
