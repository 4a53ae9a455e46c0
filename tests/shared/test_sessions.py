"""Sessions in a shared object store: leases, commits, removal, and injected faults."""

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from object_server import FAULTS, ObjectServer

from kvkeep import Snapshot
from kvkeep.errors import (
    CorruptFile,
    HeldElsewhere,
    InvalidArgument,
    Locked,
    Moved,
    NewerFormat,
    NoObject,
    StoreError,
)
from kvkeep.model import Model
from kvkeep.storage.objects import ObjectStore, open_object_store, remote
from kvkeep.storage.objects.interface import ChunkFactory, ObjectInfo
from kvkeep.storage.objects.paths import ObjectFile, ObjectPath, WritablePath
from kvkeep.storage.prefixes.inventory import evict_blocks
from kvkeep.storage.sessions import driver
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.lease import Lease
from kvkeep.storage.sessions.shared import SharedLabels, SharedSessions, sweep_all
from kvkeep.storage.snapshots.snapshot import read_snapshot_document


def sessions_of(objects: ObjectStore, writer: str, lease: float = 30.0) -> SharedSessions:
    return SharedSessions(objects, writer=writer, lease_seconds=lease)


def commit(lease: Lease, content: bytes, release: bool = False) -> SessionHead:
    return lease.commit(lambda: [content], release)


def content(sessions: SharedSessions, name: str) -> bytes:
    with sessions.existing_path(name).open("rb") as file:
        return file.read()


def test_a_saved_session_continues_bit_for_bit(objects: ObjectStore, tiny: Model) -> None:
    sessions = sessions_of(objects, "a")
    session = tiny.session(max_kv_size=32, keep=4)
    session.feed(list(range(40)))
    with sessions.lock("one") as path:
        assert not path.exists()
        size = session.snapshot().save(path)
        assert path.stat().st_size == size
        session.feed([1, 2, 3])
        session.snapshot().save(path)
    other = sessions_of(objects, "b")
    assert other.names() == ["one"]
    assert [path.stem for path in other.newest_first()] == ["one"]
    restored = tiny.restore(Snapshot.load(other.existing_path("one")))
    assert list(restored.stream(8)) == list(session.stream(8))


def test_sessions_are_dated_by_their_last_commit(objects: ObjectStore) -> None:
    """Not by a lease without one, as `gc` takes of each session."""
    sessions = sessions_of(objects, "a")
    for name in ("a", "b"):
        with sessions.lock(name) as path:
            path.write_chunks(lambda: [b"1"])
        time.sleep(0.02)
    with sessions.lock("a"), sessions.lock("uncommitted"):
        pass
    assert [path.stem for path in sessions.newest_first()] == ["b", "a"]
    sessions.sweep()
    assert [path.stem for path in sessions.newest_first()] == ["b", "a"]
    objects.put("sessions/0/c/head.json", b"damaged")
    assert [path.stem for path in sessions.newest_first()] == ["c", "b", "a"]


def test_only_the_last_committed_snapshot_is_kept(objects: ObjectStore) -> None:
    with sessions_of(objects, "a").lock("one") as path:
        for number in range(3):
            path.write_chunks(lambda number=number: [b"%d" % number])
    keys = [stored.key for stored in objects.list_objects("")]
    assert sorted(key.rpartition("/")[2] for key in keys)[1:] == ["head.json"]
    assert content(sessions_of(objects, "b"), "one") == b"2"


@pytest.mark.parametrize("labelled", [False, True])
def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_anew(
    objects: ObjectStore, tiny: Model, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    sessions, session = sessions_of(objects, "a"), tiny.session(max_kv_size=32, keep=4)
    session.feed([1, 2, 3])
    with sessions.lock("one") as written:
        read = SharedLabels(objects, "0").path("one") if labelled else sessions.path("one")
        target: WritablePath = read if isinstance(read, ObjectPath) else written
        snapshot, opened, replacements = session.snapshot(), ObjectFile.__init__, iter(range(9))
        replace(snapshot, notes={"padding": "x" * 300_000}).save(target)

        def replaced(file: ObjectFile, store: ObjectStore, info: ObjectInfo) -> None:
            opened(file, store, info)
            for number in itertools.islice(replacements, 1):
                replace(snapshot, notes={"n": number, "padding": "x" * 300_000}).save(target)

        monkeypatch.setattr(ObjectFile, "__init__", replaced)
        replacements = iter(range(2))
        assert Snapshot.load(read).notes["n"] == 1
        replacements = iter(range(2))
        assert read_snapshot_document(read)["notes"]["n"] == 1
        replacements = iter(range(99))
        with pytest.raises(StoreError, match=r"one.* was replaced by another writer"):
            Snapshot.load(read)
        replacements = iter(())
        if not labelled:
            with pytest.raises(NoObject, match="nothing was committed to session 'two'"):
                Snapshot.load(sessions.path("two"))


def test_a_leased_session_is_locked_for_others(objects: ObjectStore) -> None:
    with sessions_of(objects, "a").lock("one") as path:
        path.write_chunks(lambda: [b"1"])
        with pytest.raises(HeldElsewhere, match="session 'one' is in use by a;") as raised:
            sessions_of(objects, "b").acquire("one")
        assert raised.value.writer == "a"
        assert raised.value.until > time.time()
        with pytest.raises(Locked):
            sessions_of(objects, "b").remove("one")
    lease = sessions_of(objects, "b").acquire("one")
    assert lease.head.epoch == 2
    lease.release()


def test_a_session_created_without_a_commit_is_removed(objects: ObjectStore) -> None:
    with sessions_of(objects, "a").lock("one"):
        pass
    assert sessions_of(objects, "b").names() == []
    with pytest.raises(InvalidArgument, match="no session 'one'"):
        sessions_of(objects, "b").existing_path("one")
    with sessions_of(objects, "b").lock("one") as path:
        path.write_chunks(lambda: [b"1"])
    assert content(sessions_of(objects, "a"), "one") == b"1"


def test_a_removed_session_can_be_created_again(objects: ObjectStore) -> None:
    sessions = sessions_of(objects, "a")
    with sessions.lock("one") as path:
        path.write_chunks(lambda: [b"12345"])
    assert sessions.remove("one") == 5
    assert sessions.names() == []
    with pytest.raises(NoObject):
        sessions.acquire("one", create=False)
    lease = sessions.create("one")
    assert lease.head.epoch > 2  # epochs never repeat
    commit(lease, b"new", release=True)
    with pytest.raises(InvalidArgument, match="already"):
        sessions.create("one")
    assert content(sessions, "one") == b"new"


def test_a_writer_that_lost_its_lease_cannot_commit_and_is_notified(objects: ObjectStore) -> None:
    first = sessions_of(objects, "a", lease=0.2).acquire("one")
    commit(first, b"1")
    notified = threading.Event()
    first.on_lost(notified.set)
    time.sleep(0.01)
    # The second writer takes the lease although the first one has not released it.
    second = None
    while second is None:
        with suppress(HeldElsewhere):
            second = _acquire_ignoring_leases(objects)
    commit(second, b"2")
    with pytest.raises(Moved, match="b has acquired it"):
        commit(first, b"lost")
    assert notified.is_set()
    assert isinstance(first.failure, Moved)
    assert content(sessions_of(objects, "c"), "one") == b"2"
    second.release()


def _acquire_ignoring_leases(objects: ObjectStore) -> Lease:
    """Acquire as a writer whose clock is far ahead, for which every lease has expired."""
    from kvkeep.storage.sessions import protocol

    sessions = sessions_of(objects, "b")
    at = sessions.objects_of("one")
    version = at.run(protocol.acquire(protocol.LeaseRequest("b", time.time() + 1000, 30.0)))
    return Lease(at, version, "b", 30.0)


def test_a_lease_is_renewed_while_it_is_held(objects: ObjectStore) -> None:
    lease = sessions_of(objects, "a", lease=0.15).acquire("one")
    commit(lease, b"1")
    time.sleep(0.6)
    with pytest.raises(HeldElsewhere):
        sessions_of(objects, "b", lease=0.15).acquire("one")
    lease.release()


def test_sweep_removes_uncommitted_snapshots_of_killed_writers(objects: ObjectStore) -> None:
    sessions = sessions_of(objects, "a")
    lease = sessions.acquire("one")
    commit(lease, b"1")
    at = lease.objects
    objects.put_chunks(at.key("000000000001-000000000009-left"), lambda: [b"never committed"])
    lease.release()
    assert sessions.sweep() == ["one/000000000001-000000000009-left"]
    assert sessions.sweep() == []
    assert content(sessions, "one") == b"1"


class _StoreWithoutDeletes:
    """A store that refuses to delete."""

    def __init__(self, objects: ObjectStore):
        self._objects = objects

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def delete(self, key: str) -> None:
        raise StoreError(f"{key} cannot be deleted")


def test_sweep_removes_what_a_removed_session_has_left(objects: ObjectStore) -> None:
    sessions = sessions_of(objects, "a")
    lease = sessions.acquire("one")
    snapshot = commit(lease, b"1", release=True).snapshot
    failing: ObjectStore = _StoreWithoutDeletes(objects)  # type: ignore[assignment]
    sessions_of(failing, "a").remove("one")
    assert sessions_of(failing, "a").sweep() == []
    objects.put_chunks(lease.objects.key("000000000001-000000000009-late"), lambda: [b"2"])
    assert sorted(sessions.sweep()) == sorted(
        [f"one/{snapshot}", "one/000000000001-000000000009-late"]
    )
    assert [info.key for info in objects.list_objects("")] == ["sessions/0/one/head.json"]
    commit(sessions.create("one"), b"3", release=True)
    assert sessions.sweep() == []
    assert content(sessions, "one") == b"3"


def test_sweep_all_covers_every_owner(objects: ObjectStore) -> None:
    for owner in ("0", "a" * 32):
        lease = SharedSessions(objects, owner).acquire("one")
        commit(lease, b"1")
        objects.put_chunks(lease.objects.key("000000000001-000000000009-left"), lambda: [b"2"])
        lease.release()
    assert sweep_all(objects) == [
        f"{owner}/one/000000000001-000000000009-left" for owner in ("0", "a" * 32)
    ]
    assert sweep_all(objects) == []


def test_no_unfinished_file_outlives_gc_or_a_removed_session(tmp_path: Path) -> None:
    objects = open_object_store(tmp_path)
    name = ".kvkeep-writing-0123456789abcdef.kvkeep"
    sessions, folder = sessions_of(objects, "a"), tmp_path / "sessions" / "0" / "one" / "snapshots"
    never_written = tmp_path / "prefixes" / "0" / "parent" / name
    with sessions.lock("one") as path:
        path.write_chunks(lambda: [b"1"])
    for path in (folder / name, never_written):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"private")
    sessions.remove("one")
    assert not folder.exists()
    assert sweep_all(objects) == [str(never_written.relative_to(tmp_path))]
    never_written.write_bytes(b"private")
    assert evict_blocks(objects, 0) == (0, 0)
    assert not never_written.exists()


def test_an_invalid_head_is_a_corrupt_file(objects: ObjectStore) -> None:
    key = "sessions/0/one/head.json"
    for wrong in (b"", b"{}", b"[]", b"\xff", b'{"kvkeep": "head", "format": 1, "epoch": "1"}'):
        objects.put(key, wrong)
        with pytest.raises(CorruptFile, match="session 'one'"):
            sessions_of(objects, "a").acquire("one")
    objects.put(key, b'{"kvkeep": "head", "format": 2}')
    with pytest.raises(NewerFormat, match="upgrade"):
        sessions_of(objects, "a").existing_path("one")


def test_a_damaged_snapshot_in_the_store_is_refused(objects: ObjectStore, tiny: Model) -> None:
    sessions, session = sessions_of(objects, "a"), tiny.session(max_kv_size=32)
    session.feed([1, 2, 3])
    with sessions.lock("one") as path:
        session.snapshot().save(path)
    (stored,) = [s for s in objects.list_objects("") if s.key.endswith(".kvkeep")]
    damaged = bytearray(objects.get(stored.key)[0])
    damaged[-5] ^= 1
    objects.put(stored.key, bytes(damaged))
    with pytest.raises(CorruptFile, match="session 'one'"):
        Snapshot.load(sessions.existing_path("one"))


class ScheduledStore:
    """A store whose actors (threads) do one operation at a time, in an order that `order` draws."""

    def __init__(self, objects: ObjectStore, order: random.Random, actors: int):
        self.objects, self._order = objects, order
        self._turn = threading.Condition()
        self._waiting: set[int] = set()
        self._alive, self._next = actors, -1

    def store_for(self, actor: int) -> ObjectStore:
        return _ActorView(self, actor)  # type: ignore[return-value]

    def wait(self, actor: int) -> None:
        """Block until it is the actor's turn."""
        with self._turn:
            self._waiting.add(actor)
            self._choose()
            self._turn.wait_for(lambda: self._next == actor)
            self._waiting.discard(actor)
            self._next = -1

    def done(self) -> None:
        """Take an actor that has finished out of the schedule."""
        with self._turn:
            self._alive -= 1
            self._choose()

    def _choose(self) -> None:
        """Choose the next actor once every live one is waiting."""
        if self._next < 0 and self._waiting and len(self._waiting) == self._alive:
            self._next = self._order.choice(sorted(self._waiting))
            self._turn.notify_all()


class _ActorView:
    """The store as one actor uses it: every call waits for the actor's turn."""

    def __init__(self, scheduled: ScheduledStore, actor: int):
        self._scheduled, self._actor = scheduled, actor

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._scheduled.objects, name)

        def call_in_turn(*arguments: object, **named: object) -> object:
            self._scheduled.wait(self._actor)
            return function(*arguments, **named)

        return call_in_turn


@pytest.mark.parametrize("schedules", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_two_writers_lose_and_repeat_nothing_in_random_schedules(
    objects: ObjectStore, schedules: int
) -> None:
    """Every lease has expired for the other writer. Each commit is stored, or its writer gets an
    error, and no generation repeats."""
    if "memory" not in objects.url:
        pytest.skip("schedules depend on the protocol only; test_protocol.py covers all of them")
    lost = 0
    for seed in range(schedules):
        lost += _run_schedule(objects, f"s{seed}", random.Random(seed))
    assert lost > schedules // 10  # otherwise the writers never conflicted


def _run_schedule(objects: ObjectStore, name: str, order: random.Random) -> int:
    created = sessions_of(objects, "first").create(name)
    commit(created, json.dumps([]).encode(), release=True)
    scheduled = ScheduledStore(objects, order, 2)
    # Every reading is 100 seconds later than the last one, so that all leases have expired.
    clock = itertools.count(time.time(), 100).__next__
    confirmed: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
    losses = [0, 0]

    def write(actor: int) -> None:
        store = scheduled.store_for(actor)
        sessions = SharedSessions(store, writer=f"w{actor}", clock=clock)
        try:
            for number in range(2):
                operation = f"{actor}.{number}"
                try:
                    lease = sessions.acquire(name)
                except StoreError:
                    losses[actor] += 1
                    continue
                key = lease.objects.key(lease.head.snapshot)
                try:
                    before = json.loads(store.get(key)[0])
                    after = json.dumps([*before, operation]).encode()
                    head = commit(lease, after, release=True)
                    confirmed[actor].append((head.gen, operation))
                except StoreError:
                    losses[actor] += 1
        finally:
            scheduled.done()

    threads = [threading.Thread(target=write, args=(actor,)) for actor in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    generations = Counter(gen for pairs in confirmed.values() for gen, _ in pairs)
    assert all(count == 1 for count in generations.values())
    committed = json.loads(content(sessions_of(objects, "last"), name))
    assert sorted(committed) == sorted(
        operation for pairs in confirmed.values() for _, operation in pairs
    )
    return sum(losses)


@pytest.fixture
def without_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without waiting."""
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2)}
    monkeypatch.setitem(remote.RETRY_CONFIG, "backoff", {**backoff, "base": 2})
    monkeypatch.setattr(driver, "MAX_WAIT", 0.001)


@pytest.mark.parametrize("faults", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_injected_faults_lose_and_repeat_no_commit(
    s3: ObjectServer, s3_url: str, without_backoff: None, faults: int
) -> None:
    """Timeouts before and after, 409, 412, 500 and 503, truncated bodies: every confirmed commit is
    stored once, and every other one at most once."""
    sessions, random_faults = (
        sessions_of(open_object_store(s3_url), "a", lease=60.0),
        random.Random(7),
    )
    injected = Counter[str]()

    def fault(method: str, path: str) -> str | None:
        if method == "GET" and "list-type" in path:
            return None
        chosen = random_faults.choice(FAULTS) if random_faults.random() < 0.3 else None
        if chosen in ("409", "412") and method == "GET":
            return None
        if chosen is not None:
            injected[chosen] += 1
        return chosen

    commit(sessions.create("one"), b"[]", release=True)
    confirmed, number = [], 0
    s3.fault = fault
    while sum(injected.values()) < faults:
        number += 1
        with suppress(StoreError):
            lease = sessions.acquire("one", create=False)
            try:
                before = json.loads(content(sessions, "one"))
                commit(lease, json.dumps([*before, number]).encode())
                confirmed.append(number)
            finally:
                lease.release()
                _expire(sessions)
    s3.fault = lambda method, path: None
    committed = json.loads(content(sessions, "one"))
    assert sorted(injected) == sorted(FAULTS)
    assert len(confirmed) > faults / 20
    assert len(set(committed)) == len(committed)
    assert set(confirmed) <= set(committed)
    assert committed == sorted(committed)


def _expire(sessions: SharedSessions) -> None:
    """Expire a lease that could not be released, as a minute of waiting would."""
    while True:
        with suppress(StoreError):
            version = sessions.objects_of("one").head()
            assert version is not None
            if version.head.writer:
                at = sessions.objects_of("one")
                at.store.put(
                    "sessions/0/one/head.json",
                    version.head.updated(writer="", expires=0.0).to_json(),
                    if_match=version.etag,
                )
            return


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[Model]:
    from kvkeep import load_model

    return load_model(tiny_folder, dtype="float32")


class _SlowStore:
    """A store whose uploads take a number of seconds."""

    def __init__(self, objects: ObjectStore, seconds: float):
        self._objects, self._seconds = objects, seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def put_chunks(self, key: str, pieces: ChunkFactory) -> None:
        time.sleep(self._seconds)
        self._objects.put_chunks(key, pieces)


def test_a_lease_is_renewed_during_a_long_upload(objects: ObjectStore) -> None:
    slow: ObjectStore = _SlowStore(objects, 4.0)  # type: ignore[assignment]
    lease = sessions_of(slow, "a", lease=1.5).acquire("one")  # a busy machine renews it in time
    acquired = list[bool]()

    def try_to_acquire() -> None:
        with suppress(StoreError):
            sessions_of(objects, "b", lease=1.5).acquire("one").release()
            acquired.append(True)

    attempts = [threading.Timer(0.4 * number, try_to_acquire) for number in range(1, 10)]
    for attempt in attempts:
        attempt.start()
    commit(lease, b"1", release=True)
    for attempt in attempts:
        attempt.join()
    assert content(sessions_of(objects, "c"), "one") == b"1"


class _StoreThatLosesAResponse:
    """A store that loses the response to a put, after a callback in `then` has run."""

    def __init__(self, objects: ObjectStore):
        self._objects, self.then = objects, list[Callable[[], None]]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def put(self, key: str, content: bytes, **conditions: Any) -> str:
        tag = self._objects.put(key, content, **conditions)
        if self.then:
            self.then.pop()()
            raise StoreError("no answer")
        return tag


def test_a_commit_with_a_lost_response_is_confirmed_after_later_commits(
    objects: ObjectStore,
) -> None:
    lossy = _StoreThatLosesAResponse(objects)
    lease = sessions_of(lossy, "a").acquire("one")  # type: ignore[arg-type]

    def commit_as_another_writer() -> None:
        for number in range(3):
            other = sessions_of(objects, "b").acquire("one")
            commit(other, b"b%d" % number, release=True)

    lossy.then.append(commit_as_another_writer)
    head = commit(lease, b"a", release=True)
    assert head.gen == 1
    assert content(sessions_of(objects, "c"), "one") == b"b2"


def test_a_renewal_with_a_lost_response_keeps_the_lease(objects: ObjectStore) -> None:
    lossy = _StoreThatLosesAResponse(objects)
    lease = sessions_of(lossy, "a", lease=0.3).acquire("one")  # type: ignore[arg-type]
    lossy.then.append(lambda: None)
    time.sleep(0.5)
    commit(lease, b"1", release=True)
    assert content(sessions_of(objects, "c"), "one") == b"1"
