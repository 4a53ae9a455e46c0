"""Borrowed sessions: their home is a store elsewhere, and an engine holds them for a while."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.thread import EngineThread, in_engine_thread
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.model import Model
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")


class BorrowedSessions:
    """The interface for a caller that keeps sessions in a store, from any thread.

    A session stays while one of its leases is held. After that it may be evicted without being
    saved: the caller that released it has it in the store. All methods return futures.
    """

    def __init__(
        self,
        model: Model,
        registry: SessionRegistry,
        thread: EngineThread,
        discard: Callable[[SessionRecord], None],
    ):
        """discard: forgets a session, and cancels its generation."""
        self._model, self._registry, self._thread = model, registry, thread
        self._discard = discard

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread."""
        return self._thread.call(function)

    @in_engine_thread
    def load(self, snapshot: Snapshot, name: str, owner: str) -> SessionRecord:
        """Restore a session as another engine had it, with a lease.

        It replaces a borrowed session of that name. Raises StoreError for a snapshot of another
        model, InvalidArgument if the engine has a session of its own by that name, Busy, NoRoom.
        """
        session = self._model.restore(snapshot)
        if previous := self._registry.get(name, owner):
            if not previous.borrowed:
                raise InvalidArgument(f"this server has a session {name!r} of its own")
            self._registry.remove(previous)
        record = self._registry.add(session, owner, name)
        record.resume(snapshot.notes)
        record.borrowed, record.leases = True, 1
        return record

    @in_engine_thread
    def acquire(self, record: SessionRecord) -> bool:
        """Add a lease; False if the session is not in the engine any more."""
        record.leases += not record.removed
        return not record.removed

    @in_engine_thread
    def release(self, record: SessionRecord) -> None:
        """Give a lease back."""
        record.leases = max(0, record.leases - 1)

    @in_engine_thread
    def adopt(self, name: str, owner: str) -> SessionRecord | None:
        """Make a session that was created here a borrowed one, with a lease; None for none."""
        record = self._registry.get(name, owner)
        if record is not None:
            record.borrowed, record.leases = True, record.leases + 1
        return record

    @in_engine_thread
    def snapshot(self, record: SessionRecord) -> tuple[Snapshot, int]:
        """Return a snapshot for `load` in another engine, and its revision. Raises Busy."""
        _require_idle(record)
        return self._registry.snapshot(record), record.revision

    @in_engine_thread
    def mark_saved(self, record: SessionRecord, revision: int) -> None:
        """Note that the store has that revision."""
        record.mark_saved(revision)

    @in_engine_thread
    def revision(self, record: SessionRecord) -> int:
        """Return the revision. Raises Busy, StoreError if it is not in the engine any more."""
        _require_idle(record)
        return record.revision

    @in_engine_thread
    def discard(self, record: SessionRecord) -> None:
        """Forget the session, and cancel its generation."""
        if not record.removed:
            self._discard(record)


def _require_idle(record: SessionRecord) -> None:
    if record.removed:
        raise StoreError(f"session {record.name!r} went while it was worked on: send it again")
    record.require_idle()
