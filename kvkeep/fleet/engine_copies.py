"""The copies of a store's sessions in one engine: loaded, kept for the next request, dropped."""

from asyncio import wrap_future
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from kvkeep.engine import Engine, SessionRecord
from kvkeep.fleet.exchange import RecordedResponse, SessionKey, pop_responses
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.protocol import HeadVersion
from kvkeep.storage.sessions.shared import SharedSessions
from kvkeep.storage.snapshots.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")
_MAX_COPIES = 1_000  # copies in the engine that are tracked; older ones are loaded again


@dataclass
class EngineCopy:
    """A session in the engine, as it was last loaded from the store or committed to it."""

    record: SessionRecord  # the engine's session
    snapshot: str  # name in the store
    version: HeadVersion | None  # the head when this server last wrote it
    revision: int  # of the session, as loaded or committed
    responses: list[RecordedResponse]  # to requests with keys, the newest last


class EngineCopies:
    """The sessions of a store in one engine, which are loaded again once others have committed."""

    def __init__(
        self,
        engine: Engine,
        sessions_of: Callable[[str], SharedSessions],
        call_store: Callable[..., Awaitable[Any]],
    ):
        """sessions_of: returns an owner's sessions in the store. call_store: runs a function that
        waits for the store, in a thread."""
        self._engine, self._borrowed = engine, engine.borrowed
        self._sessions_of, self._call_store = sessions_of, call_store
        self._copies: OrderedDict[SessionKey, EngineCopy] = OrderedDict()

    def get(self, key: SessionKey) -> EngineCopy | None:
        return self._copies.get(key)

    async def load(self, key: SessionKey, head: SessionHead) -> EngineCopy:
        """Load the head's snapshot, unless the engine has it; it stays until it is released."""
        copy = self._copies.get(key)
        if copy is not None and copy.snapshot == head.snapshot:
            still_in_engine = await self._call_engine(self._borrowed.acquire, copy.record)
            if still_in_engine and copy.record.revision == copy.revision:
                return copy
            await self._call_engine(self._borrowed.discard, copy.record)
        objects = self._sessions_of(key.owner).objects_of(key.name)
        path = ObjectPath(objects.store, objects.key(head.snapshot))
        snapshot: Snapshot = await self._call_store(Snapshot.load, path)
        responses = pop_responses(snapshot.notes)
        record = await self._call_engine(self._borrowed.load, snapshot, *key)
        version = copy.version if copy else None
        copy = EngineCopy(record, head.snapshot, version, record.revision, responses)
        self.add(key, copy)
        return copy

    def add(self, key: SessionKey, copy: EngineCopy) -> None:
        """Track a copy, in place of an earlier one; the least recently added are forgotten."""
        self._copies[key] = copy
        self._copies.move_to_end(key)
        while len(self._copies) > _MAX_COPIES:
            self._copies.popitem(last=False)

    async def drop(self, key: SessionKey) -> None:
        """Drop the engine's copy of a session, and cancel its generation."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            await self._call_engine(self._borrowed.discard, copy.record)

    async def _call_engine(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await wrap_future(self._engine.call(function, *args, **kwargs))
