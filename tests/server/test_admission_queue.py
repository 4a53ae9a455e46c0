"""The order in which requests without room are admitted, and how often they are tried."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest

from kvkeep.engine import Engine
from kvkeep.errors import NoRoom
from kvkeep.server import admission_queue
from kvkeep.server.admission_queue import AdmissionQueue


@dataclass
class Memory:
    """An engine that has nothing but memory, and slots of owners."""

    free: int
    slots_per_owner: int = 1000
    running: list[str] = field(default_factory=list)  # owners
    log: list[str] = field(default_factory=list)  # requests in the order of their admission
    attempts: list[str] = field(default_factory=list)
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def queue(self, patience: float = 60.0) -> AdmissionQueue:
        return AdmissionQueue(patience, engine=cast(Engine, self))

    def room_bytes(self) -> Future[int]:
        return done(self.free)

    def watch_releases(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def submit(self, name: str, size: int, owner: str = "a") -> Callable[[], Future[str]]:
        def attempt() -> Future[str]:
            self.attempts.append(name)
            future = Future[Any]()
            if self.running.count(owner) >= self.slots_per_owner:
                future.set_exception(NoRoom("slots", needed_slots=1, of_owner=True))
            elif size > self.free:
                future.set_exception(NoRoom("memory", needed_bytes=size))
            else:
                self.free -= size
                self.running.append(owner)
                self.log.append(name)
                future.set_result(name)
            return future

        return attempt

    def release(self, size: int, owner: str = "a") -> None:
        self.free += size
        self.running.remove(owner)
        for listener in list(self.listeners):
            listener()


class SlowMemory(Memory):
    """An engine whose steps take longer than others wait for the result of a long attempt.

    Calls wait for its next step, in the order in which they came.
    """

    STEP_SECONDS = 0.4

    def __init__(self, free: int):
        super().__init__(free)
        self._calls: list[tuple[Callable[[], Future[Any]], Future[Any]]] = []
        self.results: dict[str, Future[str]] = {}  # of long requests that have room

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.STEP_SECONDS)
            calls, self._calls = self._calls, []
            for call, future in calls:
                call().add_done_callback(partial(copy_result, future))

    def room_bytes(self) -> Future[int]:
        return self._call(super().room_bytes)

    def submit(self, name: str, size: int, owner: str = "a") -> Callable[[], Future[str]]:
        attempt = super().submit(name, size, owner)
        return lambda: self._call(attempt)

    def submit_long(self, name: str, size: int, owner: str = "a") -> Callable[[], Future[str]]:
        """Return a submission whose result comes when `results` of its name is set."""
        attempt = super().submit(name, size, owner)

        def long_attempt() -> Future[str]:
            future = attempt()
            return future if future.exception() else self.results.setdefault(name, Future())

        return lambda: self._call(long_attempt)

    def _call(self, call: Callable[[], Future[Any]]) -> Future[Any]:
        future = Future[Any]()
        self._calls.append((call, future))
        return future


def copy_result(target: Future[Any], source: Future[Any]) -> None:
    if (error := source.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


def done(value: Any) -> Future[Any]:
    future = Future[Any]()
    future.set_result(value)
    return future


async def settled() -> None:
    """Wait until the queue has looked at what has changed."""
    for _ in range(20):
        await asyncio.sleep(0.005)


def admitted(memory: Memory, queue: AdmissionQueue, *requests: tuple[str, int, str]) -> Any:
    """Begin to admit requests, each a name, a size and an owner, in this order."""
    return [
        asyncio.create_task(queue.admit(owner, memory.submit(name, size, owner)))
        for name, size, owner in requests
    ]


def test_a_request_is_tried_again_only_when_there_may_be_room() -> None:
    async def run() -> None:
        memory = Memory(free=4)
        queue = memory.queue()
        await queue.admit("a", memory.submit("first", 2))
        await queue.admit("a", memory.submit("second", 2))
        tasks = admitted(memory, queue, ("large", 4, "a"))
        await asyncio.sleep(0.3)
        memory.release(2)
        await settled()
        assert memory.attempts.count("large") == 1
        memory.release(2)
        await asyncio.gather(*tasks)
        assert memory.attempts.count("large") == 2
        await settled()
        assert not memory.listeners

    asyncio.run(run())


def test_small_requests_pass_a_large_one_for_which_there_is_no_room() -> None:
    async def run() -> None:
        memory = Memory(free=4)
        queue = memory.queue()
        await queue.admit("a", memory.submit("running", 2))
        tasks = admitted(memory, queue, ("large", 4, "a"), ("small", 1, "a"), ("other", 1, "b"))
        await settled()
        assert set(memory.log) == {"running", "small", "other"}
        for owner, size in (("a", 2), ("a", 1), ("b", 1)):
            memory.release(size, owner)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_memory_is_held_free_for_a_request_that_has_waited_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other owners' small requests, however many come, do not take what is released."""
    monkeypatch.setattr(admission_queue, "_PASSING_FRACTION", 0.0)

    async def run() -> None:
        memory = Memory(free=4)
        queue, ended = memory.queue(), False

        async def flood(number: int) -> None:
            for _ in range(200):
                await queue.admit("b", memory.submit(f"b{number}", 2, "b"))
                await asyncio.sleep(0.002)
                memory.release(2, "b")
                if ended:
                    return

        floods = [asyncio.create_task(flood(number)) for number in range(4)]
        await asyncio.sleep(0.01)
        served_before = len(memory.log)
        await queue.admit("a", memory.submit("large", 4, "a"))
        assert len(memory.log) <= served_before + 10
        ended = True
        memory.release(4, "a")
        await asyncio.gather(*floods)

    asyncio.run(run())


def test_owners_take_turns() -> None:
    async def run() -> None:
        memory = Memory(free=1)
        queue = memory.queue()
        await queue.admit("a", memory.submit("running", 1))
        many = [(f"a{number}", 1, "a") for number in range(6)]
        tasks = admitted(memory, queue, *many)
        await settled()
        tasks += admitted(memory, queue, ("b0", 1, "b"), ("b1", 1, "b"))
        await settled()
        memory.release(1, "a")
        for _ in range(7):
            await settled()
            memory.release(1, memory.running[0])
        await asyncio.gather(*tasks)
        order = memory.log[1:]
        assert order.index("b0") <= 1
        assert order.index("b1") <= 3
        assert [name for name in order if name[0] == "a"] == [name for name, *_ in many]

    asyncio.run(run())


def test_an_owner_without_slots_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "_PASSING_FRACTION", 0.0)

    async def run() -> None:
        memory = Memory(free=9, slots_per_owner=1)
        queue = memory.queue()
        await queue.admit("a", memory.submit("running", 1))
        tasks = admitted(memory, queue, ("a0", 1, "a"), ("a1", 1, "a"))
        await settled()
        await queue.admit("b", memory.submit("b", 1, "b"))
        assert memory.log == ["running", "b"]
        for _ in range(2):
            memory.release(1)
            await settled()
        await asyncio.gather(*tasks)
        assert memory.log == ["running", "b", "a0", "a1"]

    asyncio.run(run())


def test_patience_begins_when_a_request_holds_no_room_itself() -> None:
    async def run() -> None:
        memory = Memory(free=1)
        queue, holds_room = memory.queue(patience=0.05), True
        await queue.admit("a", memory.submit("part", 1))
        next_part = queue.admit("a", memory.submit("next", 1), lambda: holds_room)
        task = asyncio.create_task(next_part)
        await asyncio.sleep(0.5)
        assert not task.done()
        memory.release(1)
        assert await task == "next"
        holds_room = False
        with pytest.raises(NoRoom):
            await queue.admit("a", memory.submit("last", 1), lambda: holds_room)

    asyncio.run(run())


def test_a_request_that_is_given_up_makes_way_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "_PASSING_FRACTION", 0.0)

    async def run() -> None:
        memory = Memory(free=2)
        queue = memory.queue()
        await queue.admit("a", memory.submit("running", 1))
        (large,) = admitted(memory, queue, ("large", 2, "a"))
        await settled()
        (small,) = admitted(memory, queue, ("small", 1, "b"))
        await settled()
        assert not small.done()
        large.cancel()
        assert await small == "small"
        assert not queue._waiting

    asyncio.run(run())


@pytest.mark.parametrize("is_long", [False, True])
def test_memory_is_held_free_although_attempts_wait_for_slow_steps(
    monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    monkeypatch.setattr(admission_queue, "_PASSING_FRACTION", 0.0)
    monkeypatch.setattr(admission_queue, "_ATTEMPT_SECONDS", 0.0)

    async def run() -> None:
        memory = SlowMemory(free=4)
        queue, steps = memory.queue(), asyncio.create_task(memory.run())
        await queue.admit("a", memory.submit("running", 3))
        submit = memory.submit_long if is_long else memory.submit
        large = asyncio.create_task(queue.admit("a", submit("large", 4), is_long=is_long))
        await asyncio.sleep(2 * memory.STEP_SECONDS)
        tasks = admitted(memory, queue, *((f"small{number}", 1, "b") for number in range(3)))
        await asyncio.sleep(4 * memory.STEP_SECONDS)
        assert memory.log == ["running"]
        memory.release(3)
        while "large" not in memory.log:
            await asyncio.sleep(memory.STEP_SECONDS)
        assert memory.log == ["running", "large"]
        if is_long:
            memory.results["large"].set_result("large")
        assert await large == "large"
        memory.release(4)
        await asyncio.gather(*tasks)
        steps.cancel()

    asyncio.run(run())


def test_others_do_not_wait_for_the_result_of_a_long_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_queue, "_PASSING_FRACTION", 0.0)

    async def run() -> None:
        memory = SlowMemory(free=2)
        queue, steps = memory.queue(), asyncio.create_task(memory.run())
        await queue.admit("a", memory.submit("running", 2))
        long = asyncio.create_task(queue.admit("a", memory.submit_long("long", 1), is_long=True))
        await asyncio.sleep(2 * memory.STEP_SECONDS)
        (small,) = admitted(memory, queue, ("small", 1, "b"))
        memory.release(2)
        assert await small == "small"
        assert memory.log == ["running", "long", "small"]
        assert not long.done()
        memory.results["long"].set_result("long")
        assert await long == "long"
        steps.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("a fault"), None])
def test_requests_get_turns_although_the_free_memory_is_unknown(error: Exception | None) -> None:
    """error: of the engine's call; None for a cancelled one."""

    async def run() -> None:
        memory = Memory(free=1)
        queue = memory.queue(patience=5.0)
        await queue.admit("a", memory.submit("running", 1))
        (task,) = admitted(memory, queue, ("waiting", 1, "a"))
        await settled()
        failed = Future[Any]()
        if error is None:
            failed.cancel()
        else:
            failed.set_exception(error)
        memory.room_bytes = lambda: failed  # type: ignore[method-assign]
        memory.release(1)
        assert await task == "waiting"

    asyncio.run(run())


def test_the_queue_ends_with_its_event_loop() -> None:
    """Cancelling its task while a call of the engine is awaited ends it."""

    async def run() -> asyncio.Task[None]:
        memory = Memory(free=1)
        queue = memory.queue()
        await queue.admit("a", memory.submit("running", 1))
        memory.room_bytes = Future  # type: ignore[method-assign, assignment]
        admitted(memory, queue, ("waiting", 1, "a"))
        await settled()
        assert queue._serving is not None
        return queue._serving

    assert asyncio.run(run()).cancelled()
