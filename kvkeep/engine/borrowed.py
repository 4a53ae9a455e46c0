"""Borrowed sessions: their home is a store elsewhere, and an engine holds them for a while."""

from collections.abc import Callable

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.model import Model
from kvkeep.storage.snapshots.snapshot import Snapshot


class BorrowedSessions:
    """What a caller that keeps sessions in a store does in the engine's thread (`Engine.call`).

    A session stays while one of its leases is held. After that it may be evicted without being
    saved: the caller that released it has it in the store.
    """

    def __init__(
        self, model: Model, registry: SessionRegistry, discard: Callable[[SessionRecord], None]
    ):
        """discard: forgets a session, and cancels its generation."""
        self._model, self._registry, self._discard = model, registry, discard

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

    def acquire(self, record: SessionRecord) -> bool:
        """Add a lease; False if the session is not in the engine any more."""
        record.leases += not record.removed
        return not record.removed

    def release(self, record: SessionRecord) -> None:
        """Give a lease back."""
        record.leases = max(0, record.leases - 1)

    def adopt(self, name: str, owner: str) -> SessionRecord | None:
        """Make a session that was created here a borrowed one, with a lease; None for none."""
        record = self._registry.get(name, owner)
        if record is not None:
            record.borrowed, record.leases = True, record.leases + 1
        return record

    def snapshot(self, record: SessionRecord) -> tuple[Snapshot, int]:
        """Return a snapshot to `load` elsewhere, and its revision. Raises as `revision`."""
        revision = self.revision(record)
        return self._registry.snapshot(record), revision

    def revision(self, record: SessionRecord) -> int:
        """Return the revision. Raises Busy, StoreError if it is not in the engine any more."""
        if record.removed:
            raise StoreError(f"session {record.name!r} went while it was worked on: send it again")
        record.require_idle()
        return record.revision

    def discard(self, record: SessionRecord) -> None:
        """Forget the session, and cancel its generation."""
        if not record.removed:
            self._discard(record)
