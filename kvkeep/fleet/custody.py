"""Sessions that are with this server: brought from a store, held while written, committed."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from kvkeep.engine import Engine
from kvkeep.errors import Busy, HeldElsewhere, NoObject, NoSuchSession, StoreError
from kvkeep.fleet.answered import NOTE, Answered, noted, remembered
from kvkeep.objects.interface import Pieces
from kvkeep.objects.place import ObjectPlace
from kvkeep.shared.head import Head
from kvkeep.shared.lease import Lease
from kvkeep.shared.protocol import Version
from kvkeep.shared.sessions import SharedSessions
from kvkeep.store.snapshot import Snapshot

LEASE = 2.0  # seconds for which a killed server's sessions stay held
_COPIES = 1_000  # that are known
_AGAIN = 5  # looks at a session that others commit meanwhile
_ENDING = 30.0  # seconds that the step of an answer takes at most
_LOOK = 0.1  # seconds between two looks at a session that another holds


@dataclass
class Copy:
    """What the engine's session is a copy of.

    snapshot: its name in the store. version: of the head when it was looked at last. revision: of
    the session. answered: with keys, the newest last.
    """

    snapshot: str
    version: Version | None
    revision: int
    answered: list[Answered] = field(default_factory=list)


@dataclass
class Writing:
    """A session that is being written, here and nowhere else."""

    owner: str
    name: str
    lease: Lease
    answered: list[Answered]
    before: int | None  # the revision at which it came; None for one that is only begun

    @property
    def key(self) -> tuple[str, str]:
        return self.owner, self.name


class Custody:
    """Sessions of a store, with one engine as long as nobody else writes them.

    sessions_of: an owner's in the store.
    """

    def __init__(self, engine: Engine, sessions_of: Callable[[str], SharedSessions]):
        self._engine, self._visiting = engine, engine.visiting
        self._sessions_of = sessions_of
        self._copies: OrderedDict[tuple[str, str], Copy] = OrderedDict()
        self._at_work: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def sessions(self, owner: str) -> SharedSessions:
        return self._sessions_of(owner)

    @asynccontextmanager
    async def beginning(self, owner: str, name: str) -> AsyncIterator[Writing]:
        """A session that is to be made in the engine, and committed. Raises InvalidArgument where
        there is one by that name."""
        async with self._alone(owner, name, patience=0.0):
            lease = await asyncio.to_thread(self._sessions_of(owner).begin, name)
            writing = Writing(owner, name, lease, [], None)
            try:
                await self._forget(writing.key)  # one that was removed elsewhere
                yield writing
            finally:
                if not lease.head.snapshot and lease.lost is None:
                    await self._forget(writing.key)
                    await _quietly(lease.remove)
                await asyncio.to_thread(lease.release)

    @asynccontextmanager
    async def writing(self, owner: str, name: str, patience: float = 0.0) -> AsyncIterator[Writing]:
        """A session held, and brought to the engine as it was committed last.

        What is not committed by the end is taken back. patience: seconds to wait for one that is at
        work here; one that another server holds is waited for as long as a killed server would.

        Raises NoSuchSession, Busy, HeldElsewhere.
        """
        key = owner, name
        async with self._alone(owner, name, patience):
            lease = await self._taken(owner, name)
            try:
                copy = await self._brought(owner, name, lease.head)
                try:
                    yield Writing(owner, name, lease, list(copy.answered), copy.revision)
                finally:
                    await self._settled(key, lease)
            finally:
                await asyncio.to_thread(lease.release)
                if key in self._copies:
                    self._copies[key].version = lease.version

    @asynccontextmanager
    async def reading(self, owner: str, name: str) -> AsyncIterator[None]:
        """A session in the engine as it was committed last, or as it is here at work on it.

        Raises NoSuchSession.
        """
        lock = self._lock((owner, name))
        if lock.locked():
            yield
            return
        async with lock:
            await self._seen(owner, name)
        try:
            yield
        finally:
            await asyncio.wrap_future(self._visiting.let_go(name, owner))

    async def changed(self, writing: Writing) -> bool:
        """Whether there is anything to commit."""
        now = await self._idle(writing)
        return now is not None and now != writing.before

    async def commit(self, writing: Writing, answer: Answered | None = None) -> None:
        """What the session is now is in the store, with what was answered; others may write it.

        Raises Moved where another server has taken it, StoreError.
        """
        name, owner = writing.name, writing.owner
        await self._idle(writing)
        answers = [*writing.answered, *([answer] if answer else [])]
        taken = self._visiting.snapshot(name, owner)
        snapshot, revision = await asyncio.wrap_future(taken)
        snapshot = replace(snapshot, notes={**snapshot.notes, **noted(answers)})
        await asyncio.to_thread(snapshot.save, _Committing(writing.lease))
        head, version = writing.lease.head, writing.lease.version
        self._remember(writing.key, Copy(head.snapshot, version, revision, answers))
        await asyncio.wrap_future(self._visiting.committed(name, owner, revision))

    async def removed(self, writing: Writing) -> None:
        """The session is gone, here and in the store."""
        await asyncio.to_thread(writing.lease.remove)
        await self._forget(writing.key)

    @asynccontextmanager
    async def _alone(self, owner: str, name: str, patience: float) -> AsyncIterator[None]:
        """One request at a time works on a session."""
        lock = self._lock((owner, name))
        if lock.locked() and not patience:
            raise Busy(f"session {name!r} is reading or writing; wait for it, or cancel that")
        try:
            await asyncio.wait_for(lock.acquire(), patience or None)
        except TimeoutError:
            raise Busy(f"session {name!r} is still at work on another request") from None
        try:
            yield
        finally:
            lock.release()

    def _lock(self, key: tuple[str, str]) -> asyncio.Lock:
        return self._at_work.setdefault(key, asyncio.Lock())

    async def _seen(self, owner: str, name: str) -> None:
        """The engine's session is what was committed last when this began, or later."""
        for left in reversed(range(_AGAIN)):
            version = await asyncio.to_thread(self._sessions_of(owner).at(name).head)
            if version is None or version.head.removed or not version.head.snapshot:
                await self._forget((owner, name))
                raise NoSuchSession(f"there is no session {name!r}")
            try:
                await self._brought(owner, name, version.head)
                return
            except NoObject:  # another has committed meanwhile
                if not left:
                    raise

    async def _taken(self, owner: str, name: str) -> Lease:
        sessions, copy = self._sessions_of(owner), self._copies.get((owner, name))
        known = copy.version if copy else None
        last = time.monotonic() + 1.5 * sessions.lease + 0.5
        while True:
            try:
                lease = await asyncio.to_thread(sessions.take, name, False, known)
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
            await asyncio.to_thread(lease.release)
            raise NoSuchSession(f"there is no session {name!r}")
        return lease

    async def _brought(self, owner: str, name: str, head: Head) -> Copy:
        """The engine's session is what the head says, and stays until it is let go."""
        key = owner, name
        copy = self._copies.get(key)
        if copy is not None and copy.snapshot == head.snapshot:
            try:
                kept = await asyncio.wrap_future(self._visiting.await_(name, owner))
                if kept.revision == copy.revision:
                    return copy
                await asyncio.wrap_future(self._visiting.let_go(name, owner))
            except NoSuchSession:  # it has made room for others
                pass
        at = self._sessions_of(owner).at(name)
        place = ObjectPlace(at.objects, at.key(head.snapshot))
        snapshot = await asyncio.to_thread(Snapshot.load, place)
        answered = remembered(snapshot.notes)
        snapshot.notes.pop(NOTE, None)
        kept = await asyncio.wrap_future(self._visiting.bring(snapshot, name, owner))
        copy = Copy(head.snapshot, copy.version if copy else None, kept.revision, answered)
        self._remember(key, copy)
        return copy

    def _remember(self, key: tuple[str, str], copy: Copy) -> None:
        self._copies[key] = copy
        self._copies.move_to_end(key)
        while len(self._copies) > _COPIES:
            self._copies.popitem(last=False)

    async def _settled(self, key: tuple[str, str], lease: Lease) -> None:
        """What was not committed is not kept."""
        owner, name = key
        copy = self._copies.get(key)
        try:
            now = await asyncio.wrap_future(self._visiting.revision(name, owner))
        except Busy:  # with what its client has gone away from
            now = None
        if copy is None or now != copy.revision or lease.lost is not None:
            await self._forget(key)
        else:
            await asyncio.wrap_future(self._visiting.let_go(name, owner))

    async def _idle(self, writing: Writing) -> int | None:
        """The session's revision, once an answer that was cancelled has ended."""
        last = time.monotonic() + _ENDING
        while True:
            try:
                revision = self._visiting.revision(writing.name, writing.owner)
                return await asyncio.wrap_future(revision)
            except Busy:
                if time.monotonic() > last:
                    raise
                await asyncio.sleep(0.01)

    async def _forget(self, key: tuple[str, str]) -> None:
        """The engine has no such session any more, whatever is at work in it."""
        self._copies.pop(key, None)
        owner, name = key
        with suppress(NoSuchSession):
            await asyncio.wrap_future(self._engine.discard(name, owner))


@dataclass(frozen=True)
class _Committing:
    """Commits what a snapshot is written as, and lets go of the session with that."""

    lease: Lease

    def receive(self, pieces: Pieces) -> None:
        self.lease.commit(pieces, release=True)


async def _quietly(function: Callable[[], object]) -> None:
    try:
        await asyncio.to_thread(function)
    except StoreError:
        return
