"""The bridge between HTTP handlers, in an event loop, and the engine, in its own thread."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from kvkeep.engine import (
    Engine,
    Failed,
    Finished,
    GeneratedToken,
    Generation,
    GenerationEvent,
    GenerationRequest,
    SessionRecord,
)
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys
from kvkeep.session.sampling import Sampling


@dataclass
class Service:
    """State shared by all routes.

    name: the model's name as clients see it. created: start time, seconds since 1970. closing:
    whether the server is shutting down, which ends endless streams. status_counts: HTTP responses
    by status. allow_edit: whether the web UI may change sessions. pending_responses: OpenAI
    responses in progress, by owner and id.
    """

    engine: Engine
    name: str
    keys: ApiKeys
    created: int = 0
    closing: bool = False
    status_counts: Counter[int] = field(default_factory=Counter)
    allow_edit: bool = False
    pending_responses: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def context_size(self) -> int:
        """The most tokens that a session holds by default."""
        return self.engine.settings.get("max_kv_size") or self.model.spec.max_positions

    def max_tokens(self, requested: int | None) -> int:
        """Return the requested limit, or the model's positions: unlimited is no sane default."""
        return self.model.spec.max_positions if requested is None else requested

    async def generate(
        self,
        request: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
        owner: str,
        samplings: Sequence[Sampling] | None = None,
        session: str | None = None,
        revision: int | None = None,
    ) -> "GenerationStream":
        """Submit a request to the engine: one generation, or one for each of `samplings`.

        Raises what `Engine.submit` does.
        """
        stream = GenerationStream(asyncio.get_running_loop())
        if samplings is None:
            future = self.engine.submit(request, session, owner, stream.listener(0), revision)
        else:
            assert isinstance(request, GenerationRequest)
            listeners = [stream.listener(index) for index in range(len(samplings))]
            future = self.engine.submit_many(request, samplings, owner, listeners)
        try:
            stream.generations = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_cancel_generations)
            raise
        return stream


@dataclass
class GenerationResult:
    """A finished generation: its text, its sampled tokens, and how it ended."""

    text: str
    tokens: list[GeneratedToken]
    end: Finished


class GenerationStream:
    """Generations in progress, as an event loop sees them: pairs of an index and an event."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.generations: list[Generation] = []
        self._loop = loop
        self._queue: deque[tuple[int, GenerationEvent]] = deque()
        self._available = asyncio.Event()
        self._wake_scheduled = False

    def listener(self, index: int) -> Callable[[GenerationEvent], None]:
        """Return a callback for the engine's thread that queues events under an index."""

        def enqueue(event: GenerationEvent) -> None:
            self._queue.append((index, event))
            if not self._wake_scheduled:  # one wake-up for all events until the loop runs
                self._wake_scheduled = True
                self._loop.call_soon_threadsafe(self._wake)

        return enqueue

    def _wake(self) -> None:
        self._wake_scheduled = False
        self._available.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        """Yield events until all generations have finished. Raises the first failure.

        Leaving the loop early cancels the generations.
        """
        finished = 0
        try:
            while finished < len(self.generations):
                await self._available.wait()
                self._available.clear()
                while self._queue:
                    index, event = self._queue.popleft()
                    if isinstance(event, Failed):
                        raise event.error
                    finished += isinstance(event, Finished)
                    yield index, event
        finally:
            self.cancel()

    async def collect(self) -> list[GenerationResult]:
        """Wait for all generations. Raises the first failure."""
        texts = ["" for _ in self.generations]
        tokens: list[list[GeneratedToken]] = [[] for _ in self.generations]
        ends: dict[int, Finished] = {}
        async for index, event in self:
            if isinstance(event, GeneratedToken):
                tokens[index].append(event)
            if isinstance(event, (GeneratedToken, Finished)):
                texts[index] += event.text
            if isinstance(event, Finished):
                ends[index] = event
        indices = range(len(self.generations))
        return [GenerationResult(texts[index], tokens[index], ends[index]) for index in indices]

    def cancel(self) -> None:
        """Cancel the generations that have not finished."""
        for generation in self.generations:
            generation.cancel()

    @asynccontextmanager
    async def cancel_on_disconnect(self, http_request: HttpRequest) -> AsyncIterator[None]:
        """Cancel when the client disconnects. The request's body must have been read."""

        async def watch() -> None:
            while (await http_request.receive())["type"] != "http.disconnect":
                pass
            self.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


def _cancel_generations(future: object) -> None:
    generations = future.result() if future.exception() is None else ()  # type: ignore[attr-defined]
    for generation in generations:
        generation.cancel()
