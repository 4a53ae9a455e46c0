"""Sessions that are at home in a store elsewhere, and are with an engine while it works on them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvkeep.engine.keeping import Keeping
from kvkeep.engine.kept import Kept
from kvkeep.model import Model
from kvkeep.store.snapshot import Snapshot


class Visiting:
    """For whoever keeps sessions elsewhere: each is awaited while it must stay, then may go.

    One that makes room for others is not saved: whoever let it go has it. call: runs a function in
    the engine's thread.
    """

    def __init__(
        self,
        model: Model,
        keeping: Keeping,
        call: Callable[[Callable[[], Any]], Future[Any]],
    ):
        self._model, self._keeping, self._call = model, keeping, call

    def bring(self, snapshot: Snapshot, name: str, owner: str) -> Future[Kept]:
        """A session goes on as another engine had it, awaited; in the place of one of that name.

        Raises StoreError for a snapshot of another model, Busy, NoRoom.
        """

        def brought() -> Kept:
            session = self._model.restore(snapshot)
            kept = self._keeping.welcome(session, owner, name, snapshot.notes)
            kept.visits, kept.awaited = True, 1
            return kept

        return self._call(brought)

    def await_(self, name: str, owner: str) -> Future[Kept]:
        """It stays until it is let go as often. Raises NoSuchSession where it is not here."""

        def awaited() -> Kept:
            kept = self._keeping.find(name, owner)
            kept.visits, kept.awaited = True, kept.awaited + 1
            return kept

        return self._call(awaited)

    def let_go(self, name: str, owner: str) -> Future[None]:
        """Once less awaited, if it is here still."""

        def gone() -> None:
            if self._keeping.has(name, owner):
                kept = self._keeping.find(name, owner)
                kept.awaited = max(0, kept.awaited - 1)

        return self._call(gone)

    def snapshot(self, name: str, owner: str) -> Future[tuple[Snapshot, int]]:
        """All that it is, for another engine to bring; and its revision. Raises Busy."""

        def taken() -> tuple[Snapshot, int]:
            kept = self._keeping.find(name, owner)
            kept.require_idle()
            return self._keeping.snapshot(kept), kept.revision

        return self._call(taken)

    def committed(self, name: str, owner: str, revision: int) -> Future[None]:
        """What it was at that revision is at home."""

        def told() -> None:
            if self._keeping.has(name, owner):
                kept = self._keeping.find(name, owner)
                kept.visits = True
                self._keeping.is_saved(kept, revision)

        return self._call(told)

    def revision(self, name: str, owner: str) -> Future[int | None]:
        """At which it is; None where it is not here. Raises Busy."""

        def found() -> int | None:
            if not self._keeping.has(name, owner):
                return None
            kept = self._keeping.find(name, owner)
            kept.require_idle()
            return kept.revision

        return self._call(found)
