"""What is done to an engine's sessions by name: made, changed, forked, restored, forgotten."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvkeep.engine.limits import Limits
from kvkeep.engine.operations import OperationLog
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import best_match
from kvkeep.errors import InvalidArgument, NoRoom
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")
_ADDING = ("span", "rewind")  # changes that leave the cells of what is held as they were


class SessionOperations:
    """Each is whole before the next one begins. In the engine's thread; see `Engine` for what each
    does and raises.

    operations: is told of each.
    """

    def __init__(
        self, model: Model, keeping: SessionRegistry, limits: Limits, operations: OperationLog
    ):
        self._model, self._keeping, self._limits = model, keeping, limits
        self._operations = operations

    def done(self, kept: SessionRecord, what: str, tokens: int, seconds: float) -> None:
        """Something was done to a session: it is to be saved, and told of."""
        self._keeping.changed(kept)
        self._operations.add(kept, what, tokens, seconds)

    def create(
        self, session: Session, owner: str, name: str | None, notes: dict[str, Any] | None
    ) -> SessionRecord:
        if any(kept.session is session for kept in self._keeping):
            raise InvalidArgument("the engine has that session already; give it a fork of it")
        kept = self._keep(session, owner, name, notes=notes)
        self.done(kept, "create", 0, 0.0)
        return kept

    def prepare(self, prompt: Sequence[int], name: str, owner: str, new: Session) -> int:
        """new: of the owner's, which holds nothing yet."""
        fresh = SessionRecord("", owner, False, None, new)
        known = self._keeping.has(name, owner)
        kept = self._keeping.find(name, owner) if known else fresh
        kept.require_idle()
        if known:
            self._keeping.reserve(kept, 0)
        match = best_match(prompt, self._keeping.of(owner), fresh, kept)
        if match.whole and match.record is kept:
            kept.live.draw_anew()
            return match.tokens
        source = match.record
        session = source.live.beginning(match.tokens) if source else fresh.live
        if known:
            kept.session, kept.changed = session, ""
            kept.touched()
        else:
            kept = self._keep(session, owner, name)
        kept.evaluated = min(source.evaluated, match.tokens) if source else 0
        kept.sampled = match.tokens if match.whole else 0
        return match.tokens

    def set_notes(self, name: str, owner: str, notes: dict[str, Any]) -> None:
        kept = self._keeping.find(name, owner)
        kept.notes = {**kept.notes, **notes}
        self._settled(kept)

    def pin(self, name: str, owner: str, pinned: bool, revision: int | None) -> None:
        kept = self._keeping.find(name, owner)
        kept.require_revision(revision)
        kept.pinned = pinned
        self._settled(kept)

    def inspect(self, name: str, owner: str, function: Callable[[SessionRecord], T]) -> T:
        kept = self._keeping.find(name, owner)
        self._keeping.reserve_idle(kept)
        return function(kept)

    def change(
        self,
        name: str,
        owner: str,
        what: str,
        function: Callable[[Session], T],
        revision: int | None,
        adds: int,
    ) -> T:
        kept = self._keeping.find(name, owner)
        kept.require_idle()
        kept.require_revision(revision)
        self._keeping.reserve(kept, adds)
        begun, before = time.perf_counter(), len(kept.live.tokens)
        kept.answer = function
        try:
            result = function(kept.live)
        finally:
            kept.answer = None
        kept.touched("" if what in _ADDING else what)
        added = len(kept.live.tokens) - before
        if added < 0:
            kept.stands_at(len(kept.live.tokens))
        self.done(kept, what, added, time.perf_counter() - begun)
        return result

    def fork(
        self,
        name: str,
        owner: str,
        at: int | None,
        new: str | None,
        revision: int | None,
        notes: dict[str, Any] | None,
    ) -> SessionRecord:
        kept = self._keeping.find(name, owner)
        kept.require_revision(revision)
        self._keeping.reserve_idle(kept)
        told = dict(kept.notes) if notes is None else notes
        found = self._keep(kept.live.fork(at), owner, new, kept.name, told)
        found.evaluated, found.sampled = kept.evaluated, kept.sampled
        found.changed = kept.changed
        if at is not None and at < len(kept.live.tokens):
            found.stands_at(at)
        self.done(found, "fork", 0, 0.0)
        return found

    def restore(
        self, snapshot: Snapshot, owner: str, name: str | None, replace: bool
    ) -> SessionRecord:
        session = self._model.restore(snapshot)
        if replace and name is not None and self._keeping.has(name, owner):
            kept = self._keeping.find(name, owner)
            kept.require_idle()
            kept.session = session
            kept.touched()
            self._keeping.reserve(kept, 0)
        else:
            kept = self._keep(session, owner, name)
        self._keeping.tell_again(kept, snapshot.notes)
        self.done(kept, "restore", 0, 0.0)
        return kept

    def delete(self, name: str, owner: str, revision: int | None) -> None:
        kept = self._keeping.find(name, owner)
        kept.require_revision(revision)
        self._keeping.remove(kept)
        self._operations.add(kept, "delete", 0, 0.0)

    def _keep(
        self,
        session: Session,
        owner: str,
        name: str | None,
        parent: str | None = None,
        notes: dict[str, Any] | None = None,
    ) -> SessionRecord:
        """Raises NoRoom where the owner has as many by name as there may be."""
        held = sum(
            kept.named and not (kept.visits or kept.evictable) for kept in self._keeping.of(owner)
        )
        if held >= self._limits.sessions_per_owner:
            raise NoRoom(f"there are {held} sessions already: delete some", float("inf"))
        return self._keeping.add(session, owner, name, parent, notes=notes)

    def _settled(self, kept: SessionRecord) -> None:
        """What is kept beside a session was changed: it is to be saved with that."""
        self._keeping.reserve_idle(kept)
        kept.touched()
        self._keeping.changed(kept)
