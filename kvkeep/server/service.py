"""Between HTTP, which waits in an event loop, and the engine, which computes in a thread."""

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
    Generation,
    GenerationEvent,
    GenerationRequest,
    SessionRecord,
)
from kvkeep.model import Model
from kvkeep.server.keys import Keys
from kvkeep.session.sampling import Sampling


@dataclass
class Service:
    """What all routes share.

    name: of the model, as clients see it. created: when, in seconds since 1970. closing: whether
    the server is about to end, and streams without an end are to. statuses: how many requests had
    each. making: by owner and name, what is being made that others may ask for.
    """

    engine: Engine
    name: str
    keys: Keys
    created: int = 0
    closing: bool = False
    statuses: Counter[int] = field(default_factory=Counter)
    edits: bool = False
    making: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.engine.model

    async def answers(
        self,
        ask: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
        owner: str,
        samplings: Sequence[Sampling] | None = None,
        session: str | None = None,
        revision: int | None = None,
    ) -> "Running":
        """Answers to a prompt, on their way: one, or as many as there are samplings.

        Raises what `Engine.ask` does.
        """
        running = Running(asyncio.get_running_loop())
        if samplings is None:
            future = self.engine.submit(ask, session, owner, running.listener(0), revision)
        else:
            assert isinstance(ask, GenerationRequest)
            listeners = [running.listener(index) for index in range(len(samplings))]
            future = self.engine.submit_many(ask, samplings, owner, listeners)
        try:
            running.answers = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_cancel)
            raise
        return running


class Running:
    """Answers on their way, as an event loop sees them: pairs of an index and an event."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.answers: list[Generation] = []
        self._loop = loop
        self._came: deque[tuple[int, GenerationEvent]] = deque()
        self._some = asyncio.Event()
        self._told = False

    def listener(self, index: int):  # type: ignore[no-untyped-def]
        """For the engine's thread."""

        def came(event: GenerationEvent) -> None:
            self._came.append((index, event))
            if not self._told:  # one call for all that come before the loop looks
                self._told = True
                self._loop.call_soon_threadsafe(self._wake)

        return came

    def _wake(self) -> None:
        self._told = False
        self._some.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        """Ends when all answers have. Raises what the first one failed with.

        Whoever stops asking before that cancels them.
        """
        over = 0
        try:
            while over < len(self.answers):
                await self._some.wait()
                self._some.clear()
                while self._came:
                    index, event = self._came.popleft()
                    if isinstance(event, Failed):
                        raise event.error
                    over += isinstance(event, Finished)
                    yield index, event
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Nobody wants the rest; those that are whole stay so."""
        for answer in self.answers:
            answer.cancel()

    @asynccontextmanager
    async def until_gone(self, request: HttpRequest) -> AsyncIterator[None]:
        """Cancels them when the client goes away. The request's body has been read."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


def _cancel(future: object) -> None:
    answers = future.result() if future.exception() is None else ()  # type: ignore[attr-defined]
    for answer in answers:
        answer.cancel()
