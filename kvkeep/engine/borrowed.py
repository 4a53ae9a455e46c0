"""Sessions that are at home in a store elsewhere, and are with an engine while it works on them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.errors import StoreError
from kvkeep.model import Model
from kvkeep.storage.snapshots.snapshot import Snapshot


class BorrowedSessions:
    """For whoever keeps sessions elsewhere: each is awaited while it must stay, then may go.

    One that makes room for others is not saved: whoever let it go has it. call: runs a function in
    the engine's thread. discard: forgets a session there, and cancels what is at work in it.
    """

    def __init__(
        self,
        model: Model,
        keeping: SessionRegistry,
        call: Callable[[Callable[[], Any]], Future[Any]],
        discard: Callable[[SessionRecord], None],
    ):
        self._model, self._keeping, self._call = model, keeping, call
        self._discard = discard

    def bring(self, snapshot: Snapshot, name: str, owner: str) -> Future[SessionRecord]:
        """A session goes on as another engine had it, awaited; in the place of one that visits.

        Raises StoreError for a snapshot of another model, InvalidArgument where the engine has a
        session of its own by that name, Busy, NoRoom.
        """

        def brought() -> SessionRecord:
            session = self._model.restore(snapshot)
            kept = self._keeping.welcome(session, owner, name, snapshot.notes)
            kept.visits, kept.awaited = True, 1
            return kept

        return self._call(brought)

    def await_(self, kept: SessionRecord) -> Future[bool]:
        """It stays until it is let go as often; False where it has gone already."""

        def awaited() -> bool:
            there = self._is_here(kept)
            kept.awaited += there
            return there

        return self._call(awaited)

    def let_go(self, kept: SessionRecord) -> Future[None]:
        """Once less awaited."""

        def gone() -> None:
            kept.awaited = max(0, kept.awaited - 1)

        return self._call(gone)

    def find(self, name: str, owner: str) -> Future[SessionRecord | None]:
        """A session that was made here, to be at home elsewhere from now on, awaited."""

        def found() -> SessionRecord | None:
            if not self._keeping.has(name, owner):
                return None
            kept = self._keeping.find(name, owner)
            kept.visits, kept.awaited = True, kept.awaited + 1
            return kept

        return self._call(found)

    def snapshot(self, kept: SessionRecord) -> Future[tuple[Snapshot, int]]:
        """All that it is, for another engine to bring; and its revision. Raises Busy."""

        def taken() -> tuple[Snapshot, int]:
            self._require_here(kept)
            kept.require_idle()
            return self._keeping.snapshot(kept), kept.revision

        return self._call(taken)

    def committed(self, kept: SessionRecord, revision: int) -> Future[None]:
        """What it was at that revision is at home."""
        return self._call(lambda: self._keeping.is_saved(kept, revision))

    def revision(self, kept: SessionRecord) -> Future[int]:
        """At which it is. Raises Busy, StoreError where it is not here any more."""

        def found() -> int:
            self._require_here(kept)
            kept.require_idle()
            return kept.revision

        return self._call(found)

    def forget(self, kept: SessionRecord) -> Future[None]:
        """It is not here any more, whatever was at work in it."""

        def forgotten() -> None:
            if self._is_here(kept):
                self._discard(kept)

        return self._call(forgotten)

    def _is_here(self, kept: SessionRecord) -> bool:
        name, owner = kept.name, kept.owner
        return self._keeping.has(name, owner) and self._keeping.find(name, owner) is kept

    def _require_here(self, kept: SessionRecord) -> None:
        if not self._is_here(kept):
            raise StoreError(f"session {kept.name!r} went while it was worked on: send it again")
