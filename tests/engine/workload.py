"""Requests and operations that tests submit to an engine, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine import (
    Engine,
    Failed,
    Finished,
    GeneratedToken,
    Generation,
    GenerationEvent,
    GenerationRequest,
    PinRequest,
    PrefillProgress,
    Reuse,
)
from kvkeep.errors import Cancelled
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """A request. cancel: what is counted ("read" or "written"), and the count that cancels it."""

    prompt: tuple[int, ...]
    count: int
    samplings: tuple[Sampling, ...] = (Sampling(),)
    session: str | None = None
    cancel: tuple[str, int] | None = None
    alignment: AlignmentOptions | None = None
    pins: tuple[PinRequest, ...] = ()
    whole_text: bool = False

    def do(self, engine: Engine) -> list["Result"]:
        return batch(engine, [self])[0]


@dataclass(frozen=True)
class Create:
    name: str
    settings: tuple[tuple[str, Any], ...]

    def do(self, engine: Engine) -> None:
        engine.create(name=self.name, **dict(self.settings)).result()


@dataclass(frozen=True)
class Fork:
    name: str
    at: int | None
    new: str

    def do(self, engine: Engine) -> None:
        engine.fork(self.name, at=self.at, new_name=self.new).result()


@dataclass(frozen=True)
class Change:
    """what: a method of `Session`, and its arguments."""

    name: str
    what: str
    arguments: tuple[Any, ...]

    def do(self, engine: Engine) -> None:
        engine.change(
            self.name,
            "0",
            self.what,
            lambda session: getattr(session, self.what)(*self.arguments),
        ).result()


Work = Request | Create | Fork | Change


@dataclass
class Result:
    """The result of a generation. tokens: all of its session. logits: after the last of them."""

    ended: str = ""
    error: BaseException | None = None
    read: int = 0
    written: list[int] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    logits: Tensor | None = None
    reuse: Reuse = Reuse()  # noqa: RUF009 (frozen)
    name: str = ""

    def same(self, other: "Result") -> bool:
        """Whether both are equal to the bit; a cancelled one as far as it came."""
        if isinstance(self.error, Cancelled):
            return other.written[: len(self.written)] == self.written
        if self.logits is None or other.logits is None:
            return False
        ended = (self.written, self.ended) == (other.written, other.ended)
        return ended and torch.equal(self.logits, other.logits)


class _Listener:
    """Records the events of one generation, in the engine's thread, and cancels it."""

    def __init__(self, request: Request):
        self.request, self.result = request, Result()
        self.generations: list[Generation] = []
        self.at = 0
        self.over = SimpleQueue[None]()

    def __call__(self, event: GenerationEvent) -> None:
        result, (what, most) = self.result, self.request.cancel or ("", 0)
        if isinstance(event, PrefillProgress):
            result.read, result.reuse = event.done, event.reuse
            done = what == "read" and event.done >= most
        elif isinstance(event, GeneratedToken):
            result.written.append(event.token)
            done = what == "written" and len(result.written) >= most
        else:
            self._end(event)
            return
        if done and self.generations:
            self.generations[self.at].cancel()

    def _end(self, event: Finished | Failed) -> None:
        result = self.result
        if isinstance(event, Failed):
            result.error = event.error
        else:
            result.ended, result.reuse = event.reason, event.usage.reuse
        generation = self.generations[self.at]
        result.name, result.written = generation.record.name, list(generation.generated)
        result.read = len(generation.request.prompt) - generation.unprefilled_tokens
        result.tokens = tuple(generation.record.live.tokens)
        result.logits = generation.record.live.logits
        self.over.put(None)


def batch(engine: Engine, requests: Sequence[Request]) -> list[list[Result]]:
    """Return the results of requests that the engine admits between the same two steps.

    Raises the error that refuses the only one; of several, those that are refused have none.
    """
    listeners = [[_Listener(request) for _ in request.samplings] for request in requests]

    def submit() -> list[Any]:
        submitted = []
        for request, own in zip(requests, listeners, strict=True):
            ask = GenerationRequest(
                request.prompt,
                request.count,
                request.samplings[0],
                ignore_eos=True,
                alignment=request.alignment,
                pins=request.pins,
                whole_text=request.whole_text,
            )
            if request.session is None and len(own) > 1:
                future = engine.submit_many(ask, request.samplings, "0", own)
            else:
                future = engine.submit(ask, request.session, "0", own[0])
            future.add_done_callback(_attach(own))
            submitted.append(future)
        return submitted

    futures = engine.call(submit).result()
    results = []
    for future, own in zip(futures, listeners, strict=True):
        error = future.exception()
        if error is not None and len(requests) == 1:
            raise error
        for listener in own if error is None else ():
            listener.over.get(timeout=300)
        results.append([listener.result for listener in own] if error is None else [])
    engine.call(lambda: None).result()  # what follows a generation is done
    return results


def _attach(listeners: list[_Listener]) -> Any:
    def attach(future: Any) -> None:
        if future.exception() is None:
            for at, listener in enumerate(listeners):
                listener.at, listener.generations = at, future.result()

    return attach
