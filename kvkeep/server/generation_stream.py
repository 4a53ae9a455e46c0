"""The events of generations, passed from the engine's thread to an event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvkeep.engine import (
    Failed,
    Finished,
    GeneratedToken,
    Generation,
    GenerationEvent,
    PrefillProgress,
)
from kvkeep.session.scoring import TokenScores

StreamEvent = PrefillProgress | GeneratedToken | Finished


@dataclass
class GenerationResult:
    """A generation's text and sampled tokens so far."""

    texts: list[str] = field(default_factory=list)  # joined they are `text`
    tokens: list[GeneratedToken] = field(default_factory=list)
    finished: Finished = field(init=False)  # set once the generation has ended
    prompt_scores: list[TokenScores] = field(default_factory=list)  # by step, if requested

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def sampled_tokens(self) -> list[GeneratedToken]:
        """All sampled tokens, with the end token, if one ended the generation."""
        end_token = self.finished.end_token
        return [*self.tokens, end_token] if end_token else self.tokens


class GenerationStream:
    """The events of one request's generations, passed from the engine's thread to an event loop.

    detached: whether generations go on when the stream is cancelled. Until they are admitted, the
    request is cancelled with the stream: its error would be lost.
    """

    def __init__(self, generation_count: int, detached: bool = False):
        self._detached = detached
        # One for each generation, called in the engine's thread.
        self.listeners = [partial(self._enqueue, index) for index in range(generation_count)]
        self.generations: list[Generation] = []  # empty until they are admitted
        self._admission: asyncio.Task[list[Generation]] | None = None
        self._failure: Exception | None = None
        self.results = [GenerationResult() for _ in range(generation_count)]
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[int, GenerationEvent]] = deque()
        self._events_available = asyncio.Event()
        self._wake_scheduled = False

    def _enqueue(self, index: int, event: GenerationEvent) -> None:
        self._queue.append((index, event))
        if not self._wake_scheduled:  # one wake-up for all events until the loop runs
            self._wake_scheduled = True
            with suppress(RuntimeError):  # the loop is closed; a detached generation goes on
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._wake_scheduled = False
        self._events_available.set()

    async def start(
        self, admission: Coroutine[Any, Any, list[Generation]], patience: float | None = None
    ) -> None:
        """Wait until the engine has admitted the generations, for `patience` seconds at most."""
        self._admission = asyncio.create_task(admission)
        # The client may be gone before it fails: then nothing awaits it.
        self._admission.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait([self._admission], timeout=patience)
        except asyncio.CancelledError:
            self._admission.cancel()
            raise
        if self._admission.done():
            self.generations = await self._admitted(self._admission)

    async def __aiter__(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Yield (generation index, event). Raises the first failure. Stopping cancels the rest."""
        finished_count = 0
        try:
            if self._admission is not None and not self.generations:
                self.generations = await self._admitted(self._admission)
            while finished_count < len(self.generations):
                await self._events_available.wait()
                self._events_available.clear()
                while self._queue:
                    index, event = self._queue.popleft()
                    result = self.results[index]
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, GeneratedToken):
                        result.texts.append(event.text)
                        result.tokens.append(event)
                    elif isinstance(event, Finished):
                        result.texts.append(event.text)
                        result.finished = event
                        finished_count += 1
                    elif event.scores is not None:
                        result.prompt_scores.append(event.scores)
                    yield index, event
        finally:
            self.cancel()

    async def _admitted(self, admission: asyncio.Task[list[Generation]]) -> list[Generation]:
        try:
            return await admission
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def fail(self, error: Exception) -> None:
        """End all generations with an error, also while they wait for admission."""
        self._failure = error
        for index in range(len(self.listeners)):
            self._enqueue(index, Failed(error))
        if self._admission is not None:
            self._admission.cancel()

    async def wait(self, on_event: Callable[[int, StreamEvent], None] | None = None) -> None:
        """Wait for all generations. Raises the first failure."""
        async for index, event in self:
            if on_event is not None:
                on_event(index, event)

    async def aclose(self) -> None:
        """Cancel, as `cancel` does; for a response whose client may be gone before it begins."""
        self.cancel()

    def cancel(self) -> None:
        if self._admission is not None:
            self._admission.cancel()
        if self._detached:
            return
        for generation in self.generations:
            generation.cancel()
