"""Sessions leased from a store: loaded into the engine, held while written, and committed.

In the store, a session's *head* names its last committed snapshot and the server with the lease.
"""

import asyncio
import math
import time
from asyncio import wrap_future
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from kvkeep.engine import Engine, SessionRecord
from kvkeep.errors import Busy, HeldElsewhere, KvkeepError, NoObject, NoSuchSession, StoreError
from kvkeep.fleet.engine_copies import EngineCopies, EngineCopy
from kvkeep.fleet.exchange import (
    RecordedResponse,
    SessionKey,
    newest_responses,
    response_notes,
)
from kvkeep.storage.sessions.lease import Lease
from kvkeep.storage.sessions.shared import SessionPath, SharedSessions
from kvkeep.storage.snapshots.codec import Codec

P = ParamSpec("P")
T = TypeVar("T")
LEASE_SECONDS = 2.0  # for which the sessions of a killed server stay leased
_LOAD_ATTEMPTS = 5  # while others commit
_IDLE_TIMEOUT_SECONDS = 30.0  # for the last step of a cancelled generation
_POLL_SECONDS = 0.1  # between attempts to lease a session that another server holds
_STORE_THREADS = 16


@dataclass
class LeasedSession:
    """A session that is leased to this server."""

    key: SessionKey
    lease: Lease
    record: SessionRecord | None = None  # the engine's session; None until it is created
    loaded_revision: int | None = None  # None for a new session
    responses: list[RecordedResponse] = field(default_factory=list)  # those of the `EngineCopy`
    is_detached: bool = False  # whether its answer goes on when the client is gone
    stopped: bool = False  # whether its answer was ended before it was complete
    in_sync: bool = False  # whether the engine's session surely equals the store's
    is_committing: bool = False  # whether its commit has begun
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)  # its request
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # once the lease is released

    @property
    def is_changing(self) -> bool:
        """Whether its request has changes to commit, or may have some soon."""
        record = self.record
        is_changed = record is not None and (record.busy or record.revision != self.loaded_revision)
        return self.is_committing or is_changed

    def remember(self, response: RecordedResponse | None) -> None:
        """Add the response to a request that changed nothing; the next commit stores it."""
        self.responses[:] = newest_responses(self.responses, response)


class SessionLeases:
    """Leases of a store's sessions, and their copies in one engine.

    The engine may keep a copy between requests; a request loads the session again if another server
    has committed since. sessions_of: returns an owner's sessions in the store. codec: of files.
    """

    def __init__(
        self,
        engine: Engine,
        sessions_of: Callable[[str], SharedSessions],
        codec: Codec = "exact",
    ):
        self._codec: Codec = codec
        self.engine, self._borrowed, self.sessions_of = engine, engine.borrowed, sessions_of
        self._copies = EngineCopies(engine, sessions_of, self.call_store)
        self._being_written: dict[SessionKey, LeasedSession] = {}
        self._leased: list[LeasedSession] = []  # those, and new ones
        self._locks: WeakValueDictionary[SessionKey, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(_STORE_THREADS, "kvkeep-store")
        self.request_tasks = set[asyncio.Task[None]]()  # requests in progress

    async def drain(self, seconds_left: Callable[[], float] = lambda: math.inf) -> None:
        """Stop detached answers, and wait until all requests in progress have committed.

        Once `seconds_left` returns 0, those that have changed no session yet are cancelled.
        """
        cancelled = set[asyncio.Task[None]]()
        while self.request_tasks:
            for leased in list(self._being_written.values()):
                if leased.is_detached:
                    await self._call_engine(self._stop, leased)
            if not seconds_left():
                changing_tasks = {leased.task for leased in self._leased if leased.is_changing}
                for task in self.request_tasks - changing_tasks - cancelled:
                    task.cancel()
                cancelled |= self.request_tasks - changing_tasks
            await asyncio.wait(set(self.request_tasks), timeout=_POLL_SECONDS)

    async def stop(self, key: SessionKey, revision: int | None) -> bool:
        """End the answer that a request of this server generates, and wait for its commit.

        A request that is about to generate is waited for. revision: as of `Engine.stop`. Returns
        False if no request of this server changes the session. Raises WrongRevision.
        """
        lock = self._locks.get(key)
        while lock is not None and lock.locked():
            leased = self._being_written.get(key)
            if leased is not None and leased.record is not None and leased.record.busy:
                if await self._call_engine(self._stop, leased, revision):
                    await leased.ended.wait()
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    def _stop(self, leased: LeasedSession, revision: int | None = None) -> bool:
        """End a session's generation, in the engine's thread; returns whether there was one."""
        if leased.record is None:
            return False
        leased.record.require_revision(revision)
        if leased.record.activity != "generating":
            return False
        leased.stopped = True  # before its request learns of the end
        self._borrowed.stop(leased.record)
        return True

    async def call_store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that waits for the store, in a thread of its own."""
        return await wrap_future(self._threads.submit(function, *args, **kwargs))

    async def _call_engine(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await wrap_future(self.engine.call(function, *args, **kwargs))

    @asynccontextmanager
    async def creating(self, key: SessionKey) -> AsyncIterator[LeasedSession]:
        """Lease a new session, to be created in the engine and committed within the block.

        Without a commit it is rolled back. Raises InvalidArgument if it exists, HeldElsewhere.
        """
        async with self._lock_session(key, timeout=0.0):
            sessions = self.sessions_of(key.owner)
            lease = await self.call_store(sessions.create, key.name)
            async with self._roll_back_uncommitted(LeasedSession(key, lease)) as leased:
                await self._copies.drop(key)  # of a session that another server deleted
                yield leased

    @asynccontextmanager
    async def writing(self, key: SessionKey, timeout: float = 0.0) -> AsyncIterator[LeasedSession]:
        """Lease a session and load it into the engine as it was last committed.

        Changes that are not committed within the block are rolled back. timeout: seconds to wait
        for another request of this server. If another server has the lease, this waits for as long
        as a killed server's lease lasts. Raises NoSuchSession, Busy, HeldElsewhere.
        """
        async with self._lock_session(key, timeout):
            lease = await self._acquire_lease(key)
            async with self._roll_back_uncommitted(LeasedSession(key, lease)) as leased:
                copy = await self._copies.load(key, lease.head)
                leased.record, leased.loaded_revision = copy.record, copy.revision
                leased.responses, leased.in_sync = copy.responses, True
                self._being_written[key] = leased
                yield leased

    @asynccontextmanager
    async def _roll_back_uncommitted(self, leased: LeasedSession) -> AsyncIterator[LeasedSession]:
        """Roll back what the block did not commit, and release the lease."""
        self._leased.append(leased)
        try:
            yield leased
        finally:
            self._being_written.pop(leased.key, None)
            try:
                if not leased.in_sync or leased.lease.failure is not None:
                    await self._roll_back(leased)
                elif leased.record is not None:
                    await self._call_engine(self._borrowed.release, leased.record)
            finally:
                self._leased.remove(leased)
                await self.call_store(leased.lease.release)
                if (copy := self._copies.get(leased.key)) is not None:
                    copy.version = leased.lease.version
                leased.ended.set()

    async def _roll_back(self, leased: LeasedSession) -> None:
        """Drop the session in the engine; the store has it as last committed, or not at all."""
        await self._copies.drop(leased.key)
        # A new session that the route created and that was never committed has no copy yet.
        if leased.loaded_revision is None and not leased.lease.head.snapshot:
            with suppress(KvkeepError):
                await self._call_engine(self._borrowed.discard, await self._engine_record(leased))

    @asynccontextmanager
    async def reading(
        self, key: SessionKey, committed: bool = False
    ) -> AsyncIterator[SessionRecord]:
        """Keep a session in the engine within the block, without a lease.

        The session is as last committed, or as another request of this server is writing it; with
        `committed`, this waits for that request. Raises NoSuchSession.
        """
        leased = None if committed else self._being_written.get(key)
        record = leased.record if leased else None
        if record is None or not await self._call_engine(self._borrowed.acquire, record):
            async with self._locks.setdefault(key, asyncio.Lock()):
                record = await self._load_latest(key)
        try:
            yield record
        finally:
            await self._call_engine(self._borrowed.release, record)

    async def remove(
        self, key: SessionKey, check: Callable[[SessionPath], None], request: str = ""
    ) -> None:
        """Remove a session from store and engine, without loading it: it may be damaged.

        check: called first, under the lease. request: its digest, if it may be repeated; then it
        removes the session once. Raises as `check`, NoSuchSession, Busy, HeldElsewhere.
        """
        async with self._lock_session(key, timeout=0.0):
            if request:
                objects = self.sessions_of(key.owner).objects_of(key.name)
                current = await self.call_store(objects.head)
                if current is not None and current.head.removed_by == request:
                    return
            lease = await self._acquire_lease(key)
            try:
                await self.call_store(check, SessionPath(lease.objects))
                await self.call_store(lease.remove, request)
                await self._copies.drop(key)
            finally:
                await self.call_store(lease.release)

    async def has_changes(self, leased: LeasedSession) -> bool:
        """Whether the session has changes to commit. Raises StoreError if the engine dropped it."""
        record = await self._engine_record(leased)
        return await self._wait_for_idle_revision(record) != leased.loaded_revision

    async def commit(self, leased: LeasedSession, response: RecordedResponse | None = None) -> None:
        """Commit a session with a response to record, and release its lease. Raises StoreError."""
        leased.is_committing = True
        record = await self._engine_record(leased)
        await self._wait_for_idle_revision(record)
        responses = newest_responses(leased.responses, response)
        snapshot, revision = await self._call_engine(self._borrowed.snapshot, record)
        snapshot = replace(snapshot, notes={**snapshot.notes, **response_notes(responses)})
        session_path = SessionPath(leased.lease.objects, leased.lease, release_on_commit=True)
        await self.call_store(snapshot.save_by, session_path, self._codec)
        version = leased.lease.version
        copy = EngineCopy(record, version.head.snapshot, version, revision, responses)
        self._copies.add(leased.key, copy)
        await self._call_engine(record.mark_saved, revision)
        leased.in_sync = True

    @asynccontextmanager
    async def _lock_session(self, key: SessionKey, timeout: float) -> AsyncIterator[None]:
        """Admit one request of this server at a time to a session. Raises Busy."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        # A session that is being written stays busy for long; one that is loaded does not.
        if key in self._being_written and not timeout:
            raise Busy(f"session {key.name!r} is busy; wait, or cancel the request")
        try:
            await asyncio.wait_for(lock.acquire(), timeout or _IDLE_TIMEOUT_SECONDS)
        except TimeoutError:
            raise Busy(f"session {key.name!r} is still busy with another request") from None
        try:
            yield
        finally:
            lock.release()

    async def _engine_record(self, leased: LeasedSession) -> SessionRecord:
        """Return the engine's session, which the route may have just created. Raises StoreError."""
        if leased.record is None:
            leased.record = await self._call_engine(self._borrowed.mark_borrowed, *leased.key)
        if leased.record is None:
            raise StoreError(f"session {leased.key.name!r} was removed; retry the request")
        return leased.record

    async def _load_latest(self, key: SessionKey) -> SessionRecord:
        """Load a session as committed now, or later if others commit meanwhile."""
        path = self.sessions_of(key.owner).path(key.name)
        for attempts_left in reversed(range(_LOAD_ATTEMPTS)):
            head = await self.call_store(path.head)
            if head is None or not head.snapshot:
                await self._copies.drop(key)
                raise NoSuchSession(f"there is no session {key.name!r}")
            try:
                return (await self._copies.load(key, head)).record
            except NoObject:  # another server has committed meanwhile
                if not attempts_left:
                    raise
        raise AssertionError

    async def _acquire_lease(self, key: SessionKey) -> Lease:
        """Acquire a lease; wait for as long as a killed server's lease lasts."""
        sessions, copy = self.sessions_of(key.owner), self._copies.get(key)
        head = copy.version if copy else None  # probably current, which saves reading it
        deadline = time.monotonic() + 1.5 * sessions.lease_seconds + 0.5
        while True:
            try:
                lease = await self.call_store(sessions.acquire, key.name, create=False, cached=head)
                break
            except NoObject:
                await self._copies.drop(key)
                raise NoSuchSession(f"there is no session {key.name!r}") from None
            except HeldElsewhere:
                if time.monotonic() > deadline:
                    raise
                head = None
                await asyncio.sleep(_POLL_SECONDS)
        if not lease.head.snapshot:  # its creator was killed before the first commit
            await self.call_store(lease.release)
            raise NoSuchSession(f"there is no session {key.name!r}")
        return lease

    async def _wait_for_idle_revision(self, record: SessionRecord) -> int:
        """Wait for a cancelled generation to end, and return the session's revision."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_SECONDS
        while True:
            try:
                return await self._call_engine(self._borrowed.revision, record)
            except Busy:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)
