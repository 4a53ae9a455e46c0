"""Sessions that are with this server: brought from a store, held while written, committed."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from kvkeep.engine import Engine, SessionRecord
from kvkeep.errors import Busy, HeldElsewhere, KvkeepError, NoObject, NoSuchSession, StoreError
from kvkeep.fleet.idempotency_log import NOTE, Answered, noted, remembered
from kvkeep.storage.objects.interface import Pieces
from kvkeep.storage.objects.place import ObjectPlace
from kvkeep.storage.sessions.head import Head
from kvkeep.storage.sessions.lease import Lease
from kvkeep.storage.sessions.protocol import Version
from kvkeep.storage.sessions.shared import SharedSessions
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")
LEASE = 2.0  # seconds for which a killed server's sessions stay held
_COPIES = 1_000  # that are known
_AGAIN = 5  # looks at a session that others commit meanwhile
_ENDING = 30.0  # seconds that the step of an answer takes at most
_LOOK = 0.1  # seconds between two looks at a session that another holds
_AT_STORE = 16  # threads that wait for the store
_Key = tuple[str, str]  # an owner and a name


@dataclass
class Copy:
    """What a session of the engine's is a copy of.

    kept: the session. snapshot: its name in the store. version: of the head when it was looked at
    last. revision: of the session. answered: with keys, the newest last.
    """

    kept: SessionRecord
    snapshot: str
    version: Version | None
    revision: int
    answered: list[Answered] = field(default_factory=list)


@dataclass
class Writing:
    """A session that is being written, here and nowhere else.

    kept: None until it is made. before: the revision at which it came; None for one that is only
    begun. clean: whether the engine's session is what is in the store.
    """

    owner: str
    name: str
    lease: Lease
    kept: SessionRecord | None = None
    before: int | None = None
    answered: list[Answered] = field(default_factory=list)
    clean: bool = False

    @property
    def key(self) -> _Key:
        return self.owner, self.name


class Custody:
    """Sessions of a store, with one engine as long as nobody else writes them.

    sessions_of: an owner's in the store.
    """

    def __init__(self, engine: Engine, sessions_of: Callable[[str], SharedSessions]):
        self._visiting, self._sessions_of = engine.borrowed, sessions_of
        self._copies: OrderedDict[_Key, Copy] = OrderedDict()
        self._written: dict[_Key, SessionRecord] = {}
        self._at_work: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(_AT_STORE, "kvkeep-store")

    def sessions(self, owner: str) -> SharedSessions:
        return self._sessions_of(owner)

    async def at_store(self, function: Callable[[], T]) -> T:
        """What a function gives that waits for the store, in a thread that does nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @asynccontextmanager
    async def beginning(self, owner: str, name: str) -> AsyncIterator[Writing]:
        """A session that is to be made in the engine, and committed.

        Raises InvalidArgument where there is one by that name, HeldElsewhere.
        """
        async with self._alone(owner, name, patience=0.0):
            lease = await self.at_store(lambda: self._sessions_of(owner).begin(name))
            writing = Writing(owner, name, lease)
            try:
                await self._forget(writing.key)  # one that was removed elsewhere
                yield writing
            finally:
                try:
                    if not writing.clean:
                        await self._take_back(writing)
                    elif writing.kept is not None:
                        await asyncio.wrap_future(self._visiting.let_go(writing.kept))
                finally:
                    await self.at_store(lease.release)

    @asynccontextmanager
    async def writing(self, owner: str, name: str, patience: float = 0.0) -> AsyncIterator[Writing]:
        """A session held, and brought to the engine as it was committed last.

        What is not committed by the end is taken back. patience: seconds to wait for one that is at
        work here; one that another server holds is waited for as long as a killed server would.

        Raises NoSuchSession, Busy, HeldElsewhere.
        """
        async with self._alone(owner, name, patience):
            lease = await self._taken(owner, name)
            writing = Writing(owner, name, lease)
            try:
                copy = await self._brought(owner, name, lease.head)
                writing.kept, writing.before = copy.kept, copy.revision
                writing.answered = list(copy.answered)
                self._written[writing.key] = copy.kept
                yield writing
            finally:
                self._written.pop(writing.key, None)
                try:
                    await self._settled(writing)
                finally:
                    await self.at_store(lease.release)
                    if writing.key in self._copies:
                        self._copies[writing.key].version = lease.version

    @asynccontextmanager
    async def reading(
        self, owner: str, name: str, settled: bool = False
    ) -> AsyncIterator[SessionRecord]:
        """A session in the engine as it was committed last, or as it is here at work on it.

        settled: waits where it is at work, for what is made of it is to last. Raises NoSuchSession.
        """
        kept = None if settled else self._written.get((owner, name))
        if kept is None or not await asyncio.wrap_future(self._visiting.await_(kept)):
            async with self._lock((owner, name)):
                kept = await self._seen(owner, name)
        try:
            yield kept
        finally:
            await asyncio.wrap_future(self._visiting.let_go(kept))

    @asynccontextmanager
    async def removing(self, owner: str, name: str) -> AsyncIterator[Writing]:
        """A session held, whether it can be read or not; `remove` ends it.

        Raises NoSuchSession, Busy, HeldElsewhere.
        """
        async with self._alone(owner, name, patience=0.0):
            lease = await self._taken(owner, name)
            try:
                yield Writing(owner, name, lease)
            finally:
                await self.at_store(lease.release)

    async def remove(self, writing: Writing) -> None:
        """The session is gone, here and in the store."""
        await self.at_store(writing.lease.remove)
        await self._forget(writing.key)

    async def changed(self, writing: Writing) -> bool:
        """Whether there is anything to commit. Raises StoreError where the session went."""
        return await self._idle(await self._kept(writing)) != writing.before

    async def commit(self, writing: Writing, answer: Answered | None = None) -> None:
        """What the session is now is in the store, with what was answered; others may write it.

        Raises Moved where another server has taken it, StoreError.
        """
        kept = await self._kept(writing)
        await self._idle(kept)
        answers = [*writing.answered, *([answer] if answer else [])]
        snapshot, revision = await asyncio.wrap_future(self._visiting.snapshot(kept))
        snapshot = replace(snapshot, notes={**snapshot.notes, **noted(answers)})
        await self.at_store(lambda: snapshot.save(_Committing(writing.lease)))
        head, version = writing.lease.head, writing.lease.version
        self._remember(writing.key, Copy(kept, head.snapshot, version, revision, answers))
        await asyncio.wrap_future(self._visiting.committed(kept, revision))
        writing.clean = True

    # How

    def _lock(self, key: _Key) -> asyncio.Lock:
        return self._at_work.setdefault(key, asyncio.Lock())

    @asynccontextmanager
    async def _alone(self, owner: str, name: str, patience: float) -> AsyncIterator[None]:
        """One request at a time works on a session."""
        lock = self._lock((owner, name))
        if (owner, name) in self._written and not patience:
            raise Busy(f"session {name!r} is reading or writing; wait for it, or cancel that")
        try:
            await asyncio.wait_for(lock.acquire(), patience or _ENDING)
        except TimeoutError:
            raise Busy(f"session {name!r} is still at work on another request") from None
        try:
            yield
        finally:
            lock.release()

    async def _kept(self, writing: Writing) -> SessionRecord:
        """The engine's session: one that was made meanwhile, too."""
        if writing.kept is None:
            writing.kept = await asyncio.wrap_future(
                self._visiting.find(writing.name, writing.owner)
            )
        if writing.kept is None:
            raise StoreError(f"session {writing.name!r} went while it was made: send it again")
        return writing.kept

    async def _seen(self, owner: str, name: str) -> SessionRecord:
        """The engine's session is what was committed last when this began, or later."""
        for left in reversed(range(_AGAIN)):
            version = await self.at_store(self._sessions_of(owner).at(name).head)
            if version is None or version.head.removed or not version.head.snapshot:
                await self._forget((owner, name))
                raise NoSuchSession(f"there is no session {name!r}")
            try:
                return (await self._brought(owner, name, version.head)).kept
            except NoObject:  # another has committed meanwhile
                if not left:
                    raise
        raise AssertionError

    async def _taken(self, owner: str, name: str) -> Lease:
        sessions, copy = self._sessions_of(owner), self._copies.get((owner, name))
        known = copy.version if copy else None
        last = time.monotonic() + 1.5 * sessions.lease + 0.5
        while True:
            try:
                lease = await self.at_store(partial(sessions.take, name, False, known))
                break
            except NoObject:
                await self._forget((owner, name))
                raise NoSuchSession(f"there is no session {name!r}") from None
            except HeldElsewhere:
                if time.monotonic() > last:
                    raise
                known = None
                await asyncio.sleep(_LOOK)
        if not lease.head.snapshot:  # begun by a server that was killed before it committed
            with suppress(StoreError):
                await self.at_store(lease.remove)
            await self.at_store(lease.release)
            raise NoSuchSession(f"there is no session {name!r}")
        return lease

    async def _brought(self, owner: str, name: str, head: Head) -> Copy:
        """The engine's session is what the head says, and stays until it is let go."""
        key = owner, name
        copy = self._copies.get(key)
        if copy is not None and copy.snapshot == head.snapshot:
            here = await asyncio.wrap_future(self._visiting.await_(copy.kept))
            if here and copy.kept.revision == copy.revision:
                return copy
            await asyncio.wrap_future(self._visiting.forget(copy.kept))
        at = self._sessions_of(owner).at(name)
        place = ObjectPlace(at.objects, at.key(head.snapshot))
        snapshot = await self.at_store(lambda: Snapshot.load(place))
        answered = remembered(snapshot.notes)
        snapshot.notes.pop(NOTE, None)
        kept = await asyncio.wrap_future(self._visiting.bring(snapshot, name, owner))
        version = copy.version if copy else None
        copy = Copy(kept, head.snapshot, version, kept.revision, answered)
        self._remember(key, copy)
        return copy

    def _remember(self, key: _Key, copy: Copy) -> None:
        self._copies[key] = copy
        self._copies.move_to_end(key)
        while len(self._copies) > _COPIES:
            self._copies.popitem(last=False)

    async def _settled(self, writing: Writing) -> None:
        """What was not committed is not kept."""
        if writing.kept is None:  # it could not be brought
            return
        if writing.clean and writing.lease.lost is None:
            await asyncio.wrap_future(self._visiting.let_go(writing.kept))
        else:
            await self._forget(writing.key)

    async def _take_back(self, writing: Writing) -> None:
        """What was to be a session, and was not committed."""
        with suppress(KvkeepError):
            if writing.kept is None:
                found = self._visiting.find(writing.name, writing.owner)
                writing.kept = await asyncio.wrap_future(found)
            if writing.kept is not None:
                await asyncio.wrap_future(self._visiting.forget(writing.kept))
        if not writing.lease.head.snapshot:
            with suppress(StoreError):
                await self.at_store(writing.lease.remove)

    async def _idle(self, kept: SessionRecord) -> int:
        """The session's revision, once an answer that was cancelled has ended."""
        last = time.monotonic() + _ENDING
        while True:
            try:
                return await asyncio.wrap_future(self._visiting.revision(kept))
            except Busy:
                if time.monotonic() > last:
                    raise
                await asyncio.sleep(0.01)

    async def _forget(self, key: _Key) -> None:
        """The engine has no copy of a session any more, whatever is at work in it."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            await asyncio.wrap_future(self._visiting.forget(copy.kept))


@dataclass(frozen=True)
class _Committing:
    """Commits what a snapshot is written as, and lets go of the session with that."""

    lease: Lease

    def receive(self, pieces: Pieces) -> None:
        self.lease.commit(pieces, release=True)
