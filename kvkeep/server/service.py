"""The bridge between HTTP handlers, in an event loop, and the engine, in its own thread."""

import asyncio
from asyncio import wrap_future
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest

from kvkeep.engine import (
    Engine,
    Failed,
    Finished,
    GeneratedToken,
    Generation,
    GenerationEvent,
    PrefillProgress,
    RequestLike,
    SessionRecord,
)
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.keys import ApiKeys
from kvkeep.session.sampling import Sampling

T = TypeVar("T")
_StreamEvent = PrefillProgress | GeneratedToken | Finished


@dataclass
class Service:
    """State shared by all routes."""

    engine: Engine
    model_name: str  # as clients see it
    keys: ApiKeys
    created: int = 0  # start time, seconds since 1970
    closing: bool = False  # the server is shutting down: streams of operations end
    status_counts: Counter[int] = field(default_factory=Counter)  # HTTP responses by status
    allow_edit: bool = False  # the web UI may change sessions
    # OpenAI responses in progress, by owner and id.
    pending_responses: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def context_size(self) -> int:
        """The most tokens that a session holds by default."""
        return self.engine.settings.get("max_kv_size") or self.model.spec.max_positions

    def max_tokens(self, requested: int | None) -> int:
        """Return the requested limit; by default, the model's number of positions."""
        return self.model.spec.max_positions if requested is None else requested


@dataclass(frozen=True)
class RequestContext:
    """A request, its service, and the owner of its API key."""

    service: Service
    owner: str
    http_request: HttpRequest

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def tokenizer(self) -> TextCodec:
        return self.service.model.text

    @property
    def default_sampling(self) -> Sampling:
        return self.service.model.default_sampling

    async def inspect(self, name: str, function: Callable[[SessionRecord], T]) -> T:
        """Return `function(record)` of a session by name, called in the engine's thread."""
        return await wrap_future(self.engine.inspect(name, self.owner, function))

    async def generate(
        self, request: RequestLike, name: str, revision: int | None = None
    ) -> "GenerationStream":
        """Start a generation in a session by name. Arguments and errors as of `Engine.submit`."""
        stream = GenerationStream(1)
        (listener,) = stream.listeners
        await stream.start(self.engine.submit(request, name, self.owner, listener, revision))
        return stream

    async def collect(self, *streams: "GenerationStream") -> list["GenerationResult"]:
        """Wait for all results. A failure, which is raised, or a disconnect cancels all streams."""

        async def cancel_on_disconnect() -> None:
            while (await self.http_request.receive())["type"] != "http.disconnect":
                pass  # the body was read before
            for stream in streams:
                stream.cancel()

        disconnect_watcher = asyncio.create_task(cancel_on_disconnect())
        try:
            await asyncio.gather(*(stream.wait() for stream in streams))
        finally:
            disconnect_watcher.cancel()
            for stream in streams:
                stream.cancel()
        return [result for stream in streams for result in stream.results]


async def _request_context(request: HttpRequest) -> RequestContext:
    # SecurityMiddleware has set the owner.
    return RequestContext(request.app.state.service, request.scope["owner"], request)


ContextDep = Annotated[RequestContext, Depends(_request_context)]


@dataclass
class GenerationResult:
    """A generation's text and sampled tokens so far."""

    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    finished: Finished = field(init=False)  # set once the generation has ended


class GenerationStream:
    """The events of one request's generations, passed from the engine's thread to an event loop."""

    def __init__(self, generation_count: int):
        # One for each generation, called in the engine's thread.
        self.listeners = [partial(self._enqueue, index) for index in range(generation_count)]
        self.generations: list[Generation] = []
        self.results = [GenerationResult() for _ in range(generation_count)]
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[int, GenerationEvent]] = deque()
        self._events_available = asyncio.Event()
        self._wake_scheduled = False

    def _enqueue(self, index: int, event: GenerationEvent) -> None:
        self._queue.append((index, event))
        if not self._wake_scheduled:  # one wake-up for all events until the loop runs
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._wake_scheduled = False
        self._events_available.set()

    async def start(self, submission: Future[list[Generation]]) -> None:
        """Wait until the engine has admitted the generations. submission: by `Engine.submit`."""
        try:
            self.generations = await wrap_future(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(_cancel_generations)
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[int, _StreamEvent]]:
        """Yield (generation index, event). Raises the first failure. Stopping cancels the rest."""
        finished_count = 0
        try:
            while finished_count < len(self.generations):
                await self._events_available.wait()
                self._events_available.clear()
                while self._queue:
                    index, event = self._queue.popleft()
                    result = self.results[index]
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, GeneratedToken):
                        result.text += event.text
                        result.tokens.append(event)
                    elif isinstance(event, Finished):
                        result.text += event.text
                        result.finished = event
                        finished_count += 1
                    yield index, event
        finally:
            self.cancel()

    async def wait(self) -> None:
        """Wait for all generations. Raises the first failure."""
        async for _ in self:
            pass

    def cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()


def _cancel_generations(submission: Future[list[Generation]]) -> None:
    for generation in submission.result() if submission.exception() is None else ():
        generation.cancel()
