"""Sessions in an engine that are borrowed from a store which several servers share."""

from collections.abc import Callable

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.snapshots.snapshot import Snapshot


class BorrowedSessions:
    """Operations on sessions of a store that several servers share, run by `Engine.call`.

    Callers that need a session in the engine have a *hold* on it. Without holds it may be evicted
    unsaved: the store has it.
    """

    def __init__(
        self, registry: SessionRegistry, cancel_generation: Callable[[SessionRecord], None]
    ):
        """cancel_generation: ends a session's generation, if there is one."""
        self._registry, self._cancel_generation = registry, cancel_generation

    def load(self, snapshot: Snapshot, name: str, owner: str) -> SessionRecord:
        """Restore another engine's session with its revision and notes, and with one hold.

        Replaces a borrowed session of that name. Raises StoreError for a snapshot of another model,
        InvalidArgument if the engine has a session of its own by that name, Busy, NoRoom.
        """
        session = self._registry.disk.restored(snapshot, owner)
        if previous := self._registry.get(name, owner):
            if not previous.borrowed:
                raise InvalidArgument(f"this server already has its own session {name!r}")
            self._registry.remove(previous)
        record = self._registry.add(session, owner, name)
        record.restore_from(snapshot.notes)
        record.borrowed, record.hold_count = True, 1
        return record

    def acquire(self, record: SessionRecord) -> bool:
        """Add a hold, against eviction; returns False if the session is no longer in the engine."""
        if not record.removed:
            record.hold_count += 1
        return not record.removed

    def release(self, record: SessionRecord) -> None:
        """Remove a hold."""
        record.hold_count = max(0, record.hold_count - 1)
        self._registry.releases.notify()

    def mark_borrowed(self, name: str, owner: str) -> SessionRecord | None:
        """Mark a session that was created here, before it is committed, and hold it; return it."""
        record = self._registry.get(name, owner)
        if record is not None:
            record.borrowed, record.hold_count = True, record.hold_count + 1
        return record

    def snapshot(self, record: SessionRecord) -> tuple[Snapshot, int]:
        """Return a snapshot to `load` elsewhere, and its revision. Raises as `revision`."""
        revision = self.revision(record)
        return self._registry.disk.snapshot(record), revision

    def revision(self, record: SessionRecord) -> int:
        """Return the revision of an idle session, to compare with that in the store.

        Raises Busy, and StoreError if the session is no longer in the engine.
        """
        if record.removed:
            raise StoreError(f"session {record.name!r} was removed during the request: retry it")
        record.require_idle()
        return record.revision

    def discard(self, record: SessionRecord) -> None:
        """Remove the session, and cancel its generation."""
        self._cancel_generation(record)
        if not record.removed:  # with the generation, as one without a name and still empty
            self._registry.remove(record)

    def stop(self, record: SessionRecord) -> None:
        """End the session's generation, if there is one; its tokens so far stay."""
        self._cancel_generation(record)
