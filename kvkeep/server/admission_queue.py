"""A queue before the engine's admission, instead of an immediate refusal when it is full."""

import asyncio
import logging
import time
from asyncio import wrap_future
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvkeep.engine import Engine
from kvkeep.errors import NoRoom

T = TypeVar("T")
_log = logging.getLogger("kvkeep.server")
_PASSING_FRACTION = 1 / 3  # of its timeout, for which a request is overtaken by others
_POLL_SECONDS = 1.0  # between looks at the queue if nothing was released
_POLL_SECONDS_WITHOUT_ENGINE = 0.05
_ATTEMPT_SECONDS = 5.0  # between attempts of a request whose memory is not there as far as known
_TURN_SECONDS = 0.25  # for the result of an attempt, before the engine's next step is waited for
_HELD_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class _Waiter:
    """A request in the queue. since: when its timeout begins. error: of its last attempt."""

    owner: str
    is_long: bool = False  # the result of an attempt comes long after its room is reserved
    since: float = field(default_factory=time.monotonic)
    error: NoRoom | None = None
    attempted: float = -1e9  # time of the last attempt
    turn: asyncio.Event = field(default_factory=asyncio.Event)  # it may try
    tried: asyncio.Event = field(default_factory=asyncio.Event)  # its turn is over
    admitted: bool = False
    left: bool = False  # it is no longer in the queue

    async def try_now(self) -> None:
        """Give it a turn, and wait for a short time for the result of its attempt."""
        self.tried.clear()
        self.turn.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.tried.wait(), _TURN_SECONDS)

    @property
    def has_room(self) -> bool:
        """Whether it needs no more room, or its attempt has no result yet."""
        return self.left or self.admitted or self.turn.is_set()


@dataclass
class _Shortage:
    """The memory and slots that are missing, as far as one look at the queue has found.

    room_bytes: of memory; None if unknown. slots, slots_of: the fewest slots that were missing, in
    all and for an owner. since, since_of: when the timeout began of the first one that has no
    room, and of the first one of an owner without slots.
    """

    room_bytes: int | None = None
    slots: float = float("inf")
    slots_of: dict[str, float] = field(default_factory=dict)
    since: float = float("inf")
    since_of: dict[str, float] = field(default_factory=dict)

    def add_overtaken(self, waiter: _Waiter) -> None:
        """Add a request for which there is no room."""
        if waiter.error is None or not waiter.error.of_owner:
            self.since = min(waiter.since, self.since)
        else:
            since = self.since_of.get(waiter.owner, waiter.since)
            self.since_of[waiter.owner] = min(waiter.since, since)

    def add(self, waiter: _Waiter) -> None:
        """Learn from the error of an attempt."""
        error = waiter.error
        if error is None:
            return
        if error.needed_bytes is not None:
            room = error.needed_bytes - 1
            self.room_bytes = room if self.room_bytes is None else min(room, self.room_bytes)
        elif error.needed_slots is not None and error.of_owner:
            self.slots_of[waiter.owner] = error.needed_slots
        elif error.needed_slots is not None:
            self.slots = error.needed_slots

    def blocks(self, waiter: _Waiter) -> bool:
        """Whether a request that was refused before would be refused again."""
        error = waiter.error
        if error is None or time.monotonic() - waiter.attempted > _ATTEMPT_SECONDS:
            return False
        if error.needed_bytes is not None:
            return self.room_bytes is not None and error.needed_bytes > self.room_bytes
        slots = min(self.slots, self.slots_of.get(waiter.owner, float("inf")))
        return error.needed_slots is not None and error.needed_slots >= slots


@dataclass
class AdmissionQueue:
    """Requests that wait until the engine has room, in one order over all owners.

    Owners take turns, each with its oldest request. A request that does not fit yet is overtaken
    by others that do, for a third of its timeout. From then on none of those behind it is admitted:
    what is released stays free for it.

    patience: seconds that a request waits before it is refused. max_waiting: requests of one owner
    that may wait; more are refused at once. engine: whose releases of memory and slots are
    followed; without one requests are tried again and again.
    """

    patience: float = 30.0
    max_waiting: int = 1024
    engine: Engine | None = None
    _line: list[_Waiter] = field(default_factory=list)  # in the order in which they came
    _waiting: Counter[str] = field(default_factory=Counter)  # by owner
    _last_turns: dict[str, int] = field(default_factory=dict)  # of owners, in order of admission
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: asyncio.Task[None] | None = None

    async def admit(
        self,
        owner: str,
        submit: Callable[[], Future[T]],
        holds_room: Callable[[], bool] = lambda: False,
        is_long: bool = False,
    ) -> T:
        """Submit a request, again if there is no room now. Raises NoRoom, and as `submit`.

        holds_room: whether it holds room itself, by an earlier part: its timeout begins when it
        does no more. is_long: whether the result of `submit` comes long after its room is reserved:
        others do not wait for it.
        """
        waiter = _Waiter(owner, is_long)
        if not self._line:
            try:
                return await _admitted(submit)
            except NoRoom as error:
                if error.retry_after == float("inf"):
                    raise
                waiter.error, waiter.attempted = error, time.monotonic()
        if self._waiting[owner] >= self.max_waiting:
            raise NoRoom(
                f"too many requests: {self._waiting[owner]} are waiting; retry later",
                retry_after=self.patience,
            )
        self._join(waiter)
        try:
            return await self._admit_in_turn(waiter, submit, holds_room)
        finally:
            self._leave(waiter)

    async def _admit_in_turn(
        self, waiter: _Waiter, submit: Callable[[], Future[T]], holds_room: Callable[[], bool]
    ) -> T:
        while True:
            await self._wait_for_turn(waiter, holds_room)
            waiter.attempted = time.monotonic()
            try:
                result = await _admitted(submit)
            except NoRoom as error:
                if error.retry_after == float("inf"):
                    raise
                waiter.error = error
            else:
                waiter.admitted = True
                self._last_turns[waiter.owner] = max(self._last_turns.values(), default=0) + 1
                return result
            finally:
                waiter.turn.clear()
                waiter.tried.set()

    async def _wait_for_turn(self, waiter: _Waiter, holds_room: Callable[[], bool]) -> None:
        """Wait until a request may try. Raises NoRoom at its timeout."""
        while not waiter.turn.is_set():
            if holds_room():
                waiter.since = time.monotonic()
            left = waiter.since + self.patience - time.monotonic()
            if left <= 0:
                raise waiter.error or NoRoom(
                    f"no room: the request waited {self.patience:g} s behind others; retry later"
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(waiter.turn.wait(), min(left, _HELD_CHECK_SECONDS))

    def _join(self, waiter: _Waiter) -> None:
        self._line.append(waiter)
        self._waiting[waiter.owner] += 1
        if self._serving is None:
            self._changed = asyncio.Event()
            self._serving = asyncio.create_task(self._serve())
        self._changed.set()

    def _leave(self, waiter: _Waiter) -> None:
        waiter.left = True
        waiter.tried.set()
        self._line.remove(waiter)
        self._waiting[waiter.owner] -= 1
        if not self._waiting[waiter.owner]:
            del self._waiting[waiter.owner]
        self._changed.set()

    # The order

    async def _serve(self) -> None:
        """Give turns, whenever something was released, until none waits."""
        loop, changed = asyncio.get_running_loop(), self._changed

        def on_release() -> None:  # in the engine's thread
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        stop_watching = self.engine.watch_releases(on_release) if self.engine else lambda: None
        seconds = _POLL_SECONDS if self.engine else _POLL_SECONDS_WITHOUT_ENGINE
        try:
            while self._line:
                changed.clear()
                await self._give_turns()
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), seconds)
        finally:
            stop_watching()
            self._serving = None
            self._last_turns.clear()

    async def _give_turns(self) -> None:
        """Let those requests try that may have room, in order, up to one that closes the queue."""
        shortage = _Shortage(await self._room_bytes())
        for waiter in self._in_order():
            latest = time.monotonic() - _PASSING_FRACTION * self.patience
            if shortage.since <= latest:
                return
            if waiter.left or shortage.since_of.get(waiter.owner, latest + 1) <= latest:
                continue
            if waiter.turn.is_set() and waiter.is_long:
                continue
            if not shortage.blocks(waiter):
                await waiter.try_now()
                if waiter.has_room:  # the engine finds the room after it has tried to admit
                    shortage.room_bytes = await self._room_bytes()
                if not waiter.is_long:
                    await waiter.tried.wait()
                if waiter.has_room:
                    continue
                shortage.add(waiter)
            shortage.add_overtaken(waiter)

    def _in_order(self) -> Iterator[_Waiter]:
        """Return the requests in their order: the first of each owner, then the second, and so on.

        Of several first ones that of the owner comes first who was served least recently.
        """
        counts, ranked = Counter[str](), []
        for number, waiter in enumerate(self._line):
            rank = (counts[waiter.owner], self._last_turns.get(waiter.owner, 0), number)
            ranked.append((rank, waiter))
            counts[waiter.owner] += 1
        ranked.sort(key=lambda entry: entry[0])
        return (waiter for _, waiter in ranked)

    async def _room_bytes(self) -> int | None:
        """Return the memory for requests; None if it is unknown."""
        if self.engine is None:
            return None
        try:
            return await wrap_future(self.engine.room_bytes())
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
        except Exception:  # such as that the engine ends: requests get its error
            _log.debug("the engine returned no free memory", exc_info=True)
        return None


def _is_cancelled() -> bool:
    """Whether the current task is cancelled itself, not only a future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _admitted(submit: Callable[[], Future[T]]) -> T:
    """Wait for a submission. If this is cancelled, its generations are, if it is a list of them."""
    submission = submit()
    try:
        return await wrap_future(submission)
    except asyncio.CancelledError:
        submission.add_done_callback(_cancel_generations)
        raise


def _cancel_generations(submission: Future[Any]) -> None:
    failed = submission.cancelled() or submission.exception() is not None
    result = None if failed else submission.result()
    for generation in result if isinstance(result, list) else ():
        generation.cancel()
