"""Operations on an engine's sessions: on all by name, and on those borrowed from a store."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvkeep.engine.operations import OperationLog
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import Match, best_match
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")
_NO_EDITS = ("span", "rewind")  # changes that leave the remaining cells as they were


class SessionOperations:
    """Operations of `Engine`, in its thread: each is complete before the next one begins."""

    def __init__(
        self, registry: SessionRegistry, log: OperationLog, new_session: Callable[..., Session]
    ):
        """new_session: returns one for an owner and settings that override the engine's."""
        self._registry, self._log, self._new_session = registry, log, new_session

    def sessions(self, owner: str = "0", unnamed: bool = False) -> list[SessionRecord]:
        """Return an owner's named sessions, or all: read-only, the most recently used first."""
        return [record for record in self._registry.of(owner) if record.named or unnamed]

    def find(self, name: str, owner: str = "0") -> SessionRecord:
        """Return a session, in memory or not. It is read-only."""
        return self._registry.find(name, owner)

    def explain(self, prompt: Sequence[int], owner: str = "0") -> Match:
        """Return what of a prompt would be reused, and why not more. Changes nothing."""
        return best_match(prompt, self._registry.of(owner), self._new_session(owner))

    def create(
        self,
        /,
        owner: str = "0",
        name: str | None = None,
        session: Session | None = None,
        notes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> SessionRecord:
        """Register a new session, or an existing one. settings: as of `Model.session`."""
        if session is None:
            session = self._new_session(owner, **settings)
        elif any(record.session is session for record in self._registry):
            raise InvalidArgument("the engine has that session already; give it a fork of it")
        record = self._registry.add(session, owner, name)
        record.notes = notes or {}
        self._log.add(record, "create")
        return record

    def prepare(self, prompt: Sequence[int], name: str, owner: str = "0") -> int:
        """Make a named session hold the beginning of a prompt and nothing else; returns its tokens.

        It holds what any session of the owner has of the prompt, to the bit; a prompt that
        continues where the session ends keeps all of it. A session that is missing is created.
        """
        new = self._new_session(owner)
        existing = self._registry.get(name, owner)
        if existing:
            self._registry.load_idle(name, owner)
        target = existing or SessionRecord("", owner, False, None, new)
        match = best_match(prompt, self._registry.of(owner), new, target)
        if match.resumes_session and existing and match.record is existing:
            existing.live.draw_anew()
            return match.tokens
        session = match.session(new)
        record = existing or self._registry.add(session, owner, name)
        if existing:
            record.session, record.edit = session, ""
            record.mark_changed()
        match.describe(record)
        return match.tokens

    def set_notes(self, name: str, owner: str, notes: dict[str, Any]) -> None:
        """Store JSON values with a session; they replace those of the same keys."""
        record = self._registry.load_existing(name, owner)
        record.notes = {**record.notes, **notes}
        record.mark_changed()
        record.mark_unsaved()

    def pin(self, name: str, owner: str, pinned: bool, revision: int | None = None) -> None:
        """Set whether a session stays in memory, whatever others need."""
        record = self._registry.load_existing(name, owner, revision)
        record.pinned = pinned
        record.mark_changed()
        record.mark_unsaved()

    def inspect(self, name: str, owner: str, function: Callable[[SessionRecord], T]) -> T:
        """Return a function's result for a session, which is loaded for it; it changes nothing."""
        return function(self._registry.load_existing(name, owner))

    def change(
        self,
        name: str,
        owner: str,
        what: str,
        function: Callable[[Session], T],
        revision: int | None = None,
        adds: int = 0,
    ) -> T:
        """Change a session by a function, during which nothing else changes it.

        what: names the operation in the log. adds: how many tokens at most. A function that takes
        long passes `engine.yield_turn` on as `progress`: generations continue at each of its steps.
        """
        record = self._registry.load_idle(name, owner, revision, adds)
        start, length = time.perf_counter(), len(record.live.tokens)
        record.activity = "changing"
        try:
            result = function(record.live)
        finally:
            record.activity = "idle"
        record.mark_changed("" if what in _NO_EDITS else what)
        record.note_truncation(length)
        added = len(record.live.tokens) - length
        self._log.add(record, what, added, time.perf_counter() - start)
        return result

    def fork(
        self,
        name: str,
        owner: str = "0",
        at: int | None = None,
        new: str | None = None,
        revision: int | None = None,
        notes: dict[str, Any] | None = None,
    ) -> SessionRecord:
        """Create a session from another or its first `at` tokens. notes: None for the other's."""
        record = self._registry.load_existing(name, owner, revision)
        fork = self._registry.add(record.live.fork(at), owner, new)
        fork.notes = dict(record.notes) if notes is None else notes
        fork.parent, fork.edit = record.name, record.edit
        fork.exact_tokens, fork.sampled_length = record.exact_tokens, record.sampled_length
        fork.note_truncation(len(record.live.tokens))
        self._log.add(fork, "fork")
        return fork

    def restore(
        self,
        snapshot: str | Snapshot,
        owner: str = "0",
        name: str | None = None,
        replace: bool = False,
    ) -> SessionRecord:
        """Create a session that continues where a snapshot was taken.

        snapshot: or its label, which is read in the engine's thread. replace: whether it replaces a
        session of that name, which stays as it is if the snapshot cannot be restored.
        """
        if not isinstance(snapshot, Snapshot):
            snapshot = Snapshot.load(self._registry.snapshots_of(owner).existing(snapshot))
        session = self._registry.model.restore(snapshot)
        record = self._registry.get(name, owner) if replace and name else None
        if record:
            record.require_idle()
            record.session = session
            record.mark_changed()
            self._registry.reserve(record, 0)
        else:
            record = self._registry.add(session, owner, name)
        record.derive_from(snapshot.notes)
        self._log.add(record, "restore")
        return record

    def delete(self, name: str, owner: str = "0", revision: int | None = None) -> None:
        """Forget a session, on disk too. Raises Busy while it has a generation."""
        record = self._registry.find(name, owner, revision)
        self._registry.remove(record)
        self._log.add(record, "delete")


class BorrowedSessions:
    """Operations on sessions whose home is a store elsewhere, by `Engine.call`.

    A session stays while one of its leases is held. After that it may be evicted without being
    saved: the caller that released it has it in the store.
    """

    def __init__(self, registry: SessionRegistry, discard: Callable[[SessionRecord], None]):
        """discard: forgets a session, and cancels its generation."""
        self._registry, self._discard = registry, discard

    def load(self, snapshot: Snapshot, name: str, owner: str) -> SessionRecord:
        """Restore a session as another engine had it, with a lease.

        It replaces a borrowed session of that name. Raises StoreError for a snapshot of another
        model, InvalidArgument if the engine has a session of its own by that name, Busy, NoRoom.
        """
        session = self._registry.model.restore(snapshot)
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
