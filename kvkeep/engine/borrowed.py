"""Borrowed sessions: their home is a store elsewhere, and an engine holds them for a while."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.errors import StoreError
from kvkeep.model import Model
from kvkeep.storage.snapshots.snapshot import Snapshot


class BorrowedSessions:
    """The interface for a caller that keeps sessions in a store, from any thread.

    A session stays while one of its leases is held. After that it may be evicted without being
    saved: the caller that released it has it in the store.
    """

    def __init__(
        self,
        model: Model,
        registry: SessionRegistry,
        call: Callable[[Callable[[], Any]], Future[Any]],
        discard: Callable[[SessionRecord], None],
    ):
        """call: runs a function in the engine's thread. discard: forgets a session there, and
        cancels its generation."""
        self._model, self._registry, self._call = model, registry, call
        self._discard = discard

    def load(self, snapshot: Snapshot, name: str, owner: str) -> Future[SessionRecord]:
        """Restore a session as another engine had it, with a lease.

        It replaces a borrowed session of that name. Raises StoreError for a snapshot of another
        model, InvalidArgument if the engine has a session of its own by that name, Busy, NoRoom.
        """

        def load() -> SessionRecord:
            session = self._model.restore(snapshot)
            record = self._registry.add_borrowed(session, owner, name, snapshot.notes)
            record.borrowed, record.leases = True, 1
            return record

        return self._call(load)

    def acquire(self, record: SessionRecord) -> Future[bool]:
        """Add a lease; False if the session is not in the engine any more."""

        def acquire() -> bool:
            present = self._is_present(record)
            record.leases += present
            return present

        return self._call(acquire)

    def release(self, record: SessionRecord) -> Future[None]:
        """Give a lease back."""

        def release() -> None:
            record.leases = max(0, record.leases - 1)

        return self._call(release)

    def adopt(self, name: str, owner: str) -> Future[SessionRecord | None]:
        """Make a session that was created here a borrowed one, with a lease; None for none."""

        def adopt() -> SessionRecord | None:
            if not self._registry.has(name, owner):
                return None
            record = self._registry.find(name, owner)
            record.borrowed, record.leases = True, record.leases + 1
            return record

        return self._call(adopt)

    def snapshot(self, record: SessionRecord) -> Future[tuple[Snapshot, int]]:
        """Return a snapshot for `load` in another engine, and its revision. Raises Busy."""

        def snapshot() -> tuple[Snapshot, int]:
            self._require_idle(record)
            return self._registry.snapshot(record), record.revision

        return self._call(snapshot)

    def mark_saved(self, record: SessionRecord, revision: int) -> Future[None]:
        """Note that the store has that revision."""
        return self._call(lambda: self._registry.mark_saved(record, revision))

    def revision(self, record: SessionRecord) -> Future[int]:
        """Return the revision. Raises Busy, StoreError if it is not in the engine any more."""

        def revision() -> int:
            self._require_idle(record)
            return record.revision

        return self._call(revision)

    def discard(self, record: SessionRecord) -> Future[None]:
        """Forget the session, and cancel its generation."""

        def discard() -> None:
            if self._is_present(record):
                self._discard(record)

        return self._call(discard)

    def _is_present(self, record: SessionRecord) -> bool:
        name, owner = record.name, record.owner
        return self._registry.has(name, owner) and self._registry.find(name, owner) is record

    def _require_idle(self, record: SessionRecord) -> None:
        if not self._is_present(record):
            raise StoreError(f"session {record.name!r} went while it was worked on: send it again")
        record.require_idle()
