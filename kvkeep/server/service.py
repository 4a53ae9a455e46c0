"""The bridge between HTTP handlers, in an event loop, and the engine, in its own thread."""

import asyncio
from asyncio import wrap_future
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar
from weakref import WeakSet

from fastapi import Depends
from fastapi import Request as HttpRequest

from kvkeep.chat.late_tools import LateTools
from kvkeep.chat.messages import Chat
from kvkeep.chat.prompt_rules import DEFAULT_RULES, LATE_TOOLS, PromptRule, apply_rules
from kvkeep.engine import (
    Engine,
    Generation,
    RequestLike,
    SessionOperations,
    SessionRecord,
)
from kvkeep.errors import Cancelled
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.admission_queue import AdmissionQueue
from kvkeep.server.generation_stream import GenerationResult, GenerationStream, StreamEvent
from kvkeep.server.keys import ApiKeys
from kvkeep.server.notices import Notices
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.sampling import Sampling
from kvkeep.types import ContextPolicy

T = TypeVar("T")
Submission = Callable[[], Future[list[Generation]]]


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
    # For prompts longer than the context; see `kvkeep.server.overflow`.
    context_policy: ContextPolicy = "refuse"
    # The part of `max_kv_size` beyond which a turn compacts its session first; None for never.
    compact_at: float | None = None
    prompt_rules: Sequence[PromptRule] = DEFAULT_RULES  # for the prompts of the chat APIs
    admission_queue: AdmissionQueue = field(default_factory=AdmissionQueue)
    # Of prefixes that requests mark, in tokens, by a digest of owner and text; the newest last.
    prefix_lengths: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    late_tools: LateTools = field(default_factory=LateTools)  # for the prompt rule of that name
    # Compiles schemas and grammars, which may take seconds: other requests need the threads of
    # `to_thread`.
    compiler: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, "kvkeep-compiler")
    )
    # OpenAI responses in progress, by owner and id.
    pending_responses: dict[tuple[str, str], Any] = field(default_factory=dict)
    streams: WeakSet[GenerationStream] = field(default_factory=WeakSet)  # of running requests

    def __post_init__(self) -> None:
        self.admission_queue.engine = self.engine

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def context_size(self) -> int:
        """The most tokens that a session holds by default."""
        return self.engine.default_max_kv_size

    def ruled(self, owner: str, chat: Chat, whole: bool = True) -> tuple[Chat, tuple[str, ...]]:
        """Return a conversation changed by the prompt rules, and their names.

        whole: whether it is a whole request's, and not the beginning of one.
        """
        chat, names = apply_rules(chat, self.prompt_rules)
        if any(rule.name == LATE_TOOLS for rule in self.prompt_rules):
            placed = self.late_tools.place(owner, chat, remember=whole)
            if placed is not chat:
                return placed, (*names, LATE_TOOLS)
        return chat, names

    def end_streams(self) -> None:
        """End all generations with the error that the server shuts down."""
        for stream in list(self.streams):
            stream.fail(Cancelled("the server is shutting down"))

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

    @property
    def default_alignment(self) -> AlignmentOptions:
        """The alignment of prompts whose requests do not choose one."""
        return self.service.keys.alignment(self.owner, self.engine.alignment)

    @property
    def notices(self) -> Notices:
        return Notices.of(self.http_request.scope)

    async def inspect(self, name: str, function: Callable[[SessionRecord], T]) -> T:
        """Return `function(record)` of a session by name, called in the engine's thread."""
        return await wrap_future(self.engine.inspect(name, self.owner, function))

    async def run_in_steps(self, function: Callable[[SessionOperations], T]) -> T:
        """Return the result of `Engine.run_in_steps`. A disconnect, then Cancelled, ends it."""

        async def run() -> T:
            return await wrap_future(self.engine.run_in_steps(function))

        return await self.while_connected(run())

    async def generate(
        self,
        request: RequestLike,
        name: str,
        revision: int | None = None,
        detached: bool = False,
    ) -> "GenerationStream":
        """Start a generation in a session by name. Arguments and errors as of `Engine.submit`.

        detached: as of `GenerationStream`.
        """
        stream = GenerationStream(1, detached)
        (listener,) = stream.listeners
        submit = partial(self.engine.submit, request, name, self.owner, listener, revision)
        await self.start(stream, [submit])
        return stream

    async def start(
        self,
        stream: "GenerationStream",
        submissions: Sequence[Submission],
        patience: float | None = None,
    ) -> None:
        """Wait in the admission queue, and start the stream's generations.

        patience: seconds after which it returns although they have not started: iterating over the
        stream then waits for that. If a submission fails, which is raised, all are cancelled, and
        if the client disconnects meanwhile: raises Cancelled.
        """
        self.service.streams.add(stream)
        is_gone = Cancelled("the client disconnected before the request was admitted")
        async with self._on_disconnect(lambda: stream.fail(is_gone)):
            await stream.start(self._admit(submissions), patience)

    async def _admit(self, submissions: Sequence[Submission]) -> list[Generation]:
        """Admit the generations of a request one after the other.

        Those that were admitted may hold the memory for which the next one waits.
        """
        generations: list[Generation] = []

        def are_running() -> bool:
            return any(generation.phase != "done" for generation in generations)

        queue = self.service.admission_queue
        try:
            for submit in submissions:
                admitted = await queue.admit(self.owner, submit, are_running)
                generations += admitted
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return generations

    async def collect(
        self,
        *streams: "GenerationStream",
        on_event: Callable[[int, StreamEvent], None] | None = None,
    ) -> list["GenerationResult"]:
        """Wait for all results. A failure, which is raised, or a disconnect cancels all streams.

        on_event: called with the index of the generation and each of its events.
        """

        def cancel() -> None:
            for stream in streams:
                stream.cancel()

        async with self._on_disconnect(cancel):
            try:
                await asyncio.gather(*(stream.wait(on_event) for stream in streams))
            finally:
                cancel()
        return [result for stream in streams for result in stream.results]

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work, which is cancelled if the client disconnects.

        Raises Cancelled then. Long calls of the engine that the work awaits end, too.
        """
        task = asyncio.create_task(work)
        async with self._on_disconnect(task.cancel):
            try:
                return await task
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                raise Cancelled("the client disconnected: the request was cancelled") from None

    @asynccontextmanager
    async def _on_disconnect(self, function: Callable[[], object]) -> AsyncIterator[None]:
        """Call a function if the client disconnects during the block."""

        async def watch() -> None:
            while (await self.http_request.receive())["type"] != "http.disconnect":
                pass  # the body was read before
            function()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


async def _request_context(request: HttpRequest) -> RequestContext:
    # SecurityMiddleware has set the owner.
    return RequestContext(request.app.state.service, request.scope["owner"], request)


ContextDep = Annotated[RequestContext, Depends(_request_context)]
