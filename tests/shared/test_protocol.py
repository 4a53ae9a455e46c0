"""The lease protocol in every schedule of a few writers, readers and collectors."""

import math
from collections.abc import Generator
from typing import Any

import pytest
from shared.exploring import Actor, Explorer, Fetch, Upload, Violation

from kvkeep.errors import HeldElsewhere, NoObject, StoreError
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.head import SessionHead, new_snapshot_name
from kvkeep.storage.sessions.protocol import HeadVersion, LeaseRequest, PutHead, ReadHead

# A lease of 0 seconds has expired when it begins, so that no clock excludes any writer.
IGNORING_CLOCKS = {"now": math.inf, "seconds": 0.0}
START = SessionHead(1, 1, "first", "", 0.0, "000000000001-000000000001-0")


def writer(name: str, commits: int, renews: bool = False) -> Actor:
    """Return an actor that acquires the session, commits a number of times, and releases it."""

    def steps(confirmed: list[str]) -> Generator[Any, Any, None]:
        try:
            lease = yield from protocol.acquire(LeaseRequest(name, **IGNORING_CLOCKS))
            if renews:
                lease = yield from protocol.renew(lease, LeaseRequest(name, **IGNORING_CLOCKS))
            for _ in range(commits):
                snapshot = new_snapshot_name(lease.head)
                yield Upload(snapshot)
                lease = yield from protocol.commit(lease, snapshot, 1.0, name)
                confirmed.append(lease.head.snapshot)
            yield from protocol.release(lease)
        except StoreError:
            return

    return steps


def collector(confirmed: list[str]) -> Generator[Any, Any, None]:
    """Acquire the session, unless it was removed, and delete its unreferenced snapshots."""
    try:
        version = yield ReadHead()
        if version is not None and version.head.removed:
            yield from protocol.collect_garbage(version)
            return
        lease = yield from protocol.acquire(LeaseRequest("collector", **IGNORING_CLOCKS))
        yield from protocol.collect_garbage(lease)
        yield from protocol.release(lease)
    except StoreError:
        return


def remover(confirmed: list[str]) -> Generator[Any, Any, None]:
    """Acquire the session and remove it."""
    try:
        lease = yield from protocol.acquire(LeaseRequest("remover", **IGNORING_CLOCKS))
        yield from protocol.remove(lease)
    except StoreError:
        return


def creator(name: str) -> Actor:
    """Return an actor that creates the session and commits its first snapshot."""

    def steps(confirmed: list[str]) -> Generator[Any, Any, None]:
        try:
            lease = yield from protocol.create(LeaseRequest(name, **IGNORING_CLOCKS))
            snapshot = new_snapshot_name(lease.head)
            yield Upload(snapshot)
            lease = yield from protocol.commit(lease, snapshot, protocol.RELEASED, "")
            confirmed.append(lease.head.snapshot)
        except (StoreError, ValueError):
            return

    return steps


def reader(confirmed: list[str]) -> Generator[Any, Any, None]:
    """Check that the snapshot which an unchanged head names exists."""
    snapshot = None
    for _ in range(2):
        try:
            version = yield ReadHead()
            if version is None or not version.head.snapshot or version.head.snapshot == snapshot:
                return
            snapshot = version.head.snapshot
            if (yield Fetch(snapshot)):
                return
            second_version = yield ReadHead()
        except StoreError:
            return
        if second_version.head.snapshot == snapshot:
            raise Violation("a head names a missing snapshot")


WORLDS = {
    "two writers, a fault": ([writer("a", 1), writer("b", 1)], START, 1),
    "two writers of two commits": ([writer("a", 2), writer("b", 2)], START, 0),
    "a writer that renews, and another, a fault": (
        [writer("a", 1, True), writer("b", 1)],
        START,
        1,
    ),
    "a writer, a collector, a fault": ([writer("a", 1), collector], START, 1),
    "a writer, a remover, a fault": ([writer("a", 1), remover], START, 1),
    "a remover, a creator, a collector": ([remover, creator("b"), collector], START, 0),
    "a writer, a reader, a fault": ([writer("a", 2), reader], START, 1),
    "two creators, 2 faults": ([creator("a"), creator("b")], None, 2),
}
# Minutes each, by `make test-slow`.
LARGER = {
    "two writers, 2 faults": ([writer("a", 1), writer("b", 1)], START, 2),
    "two writers of two commits, a fault": ([writer("a", 2), writer("b", 2)], START, 1),
    "three writers": ([writer("a", 1), writer("b", 1), writer("c", 1)], START, 0),
    "a writer, a collector, 2 faults": ([writer("a", 1), collector], START, 2),
    "two writers, a collector": ([writer("a", 1), writer("b", 1), collector], START, 0),
    "a writer, a remover, 2 faults": ([writer("a", 1), remover], START, 2),
    "a remover, a creator and a writer": ([remover, creator("b"), writer("a", 1)], START, 0),
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_schedule_loses_or_repeats_a_confirmed_commit(name: str) -> None:
    explore(name, *WORLDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_no_schedule_of_larger_worlds_loses_or_repeats_a_confirmed_commit(name: str) -> None:
    explore(name, *LARGER[name])


def explore(name: str, actors: list[Actor], head: SessionHead | None, faults: int) -> None:
    schedules, states = Explorer(actors, head, faults).explore()
    print(f"{name}: {schedules:,} schedules through {states:,} states")
    assert schedules > 100


def test_the_explorer_finds_a_lost_commit() -> None:
    """Writers that put a head without checking the lease in between lose commits."""

    def careless(confirmed: list[str]) -> Generator[Any, Any, None]:
        version = yield ReadHead()
        name = f"{version.head.epoch:012}-x"
        yield Upload(name)
        current = yield ReadHead()
        head = version.head.updated(gen=version.head.gen + 1, snapshot=name)
        yield PutHead(head, current.etag)
        confirmed.append(name)

    with pytest.raises(Violation):
        Explorer([careless, careless], START, 0).explore()


def test_the_explorer_finds_a_collector_that_ignores_epochs() -> None:
    def greedy(confirmed: list[str]) -> Generator[Any, Any, None]:
        names = yield protocol.ListSnapshots()
        version = yield ReadHead()
        for name in names:
            if name != version.head.snapshot:
                yield protocol.DeleteSnapshot(name)

    with pytest.raises(Violation):
        Explorer([writer("a", 1), greedy], START, 0).explore()


def test_acquiring_a_missing_session_raises_no_object() -> None:
    steps = protocol.acquire(LeaseRequest("a", 0.0, 1.0))
    assert next(steps) == ReadHead()
    with pytest.raises(NoObject):
        steps.send(None)


def test_a_lease_excludes_other_writers_until_it_expires() -> None:
    version = HeadVersion(SessionHead(3, 1, "n", "b", 10.0, "s"), "tag")
    steps = protocol.acquire(LeaseRequest("a", 9.0, 1.0))
    next(steps)
    with pytest.raises(HeldElsewhere, match="b"):
        steps.send(version)
    steps = protocol.acquire(LeaseRequest("a", 10.5, 1.0))
    next(steps)
    put = steps.send(version)
    assert put.etag == "tag"
    assert (put.head.epoch, put.head.writer, put.head.expires) == (4, "a", 11.5)
