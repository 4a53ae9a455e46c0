"""Operations on an engine's sessions by name: create, change, fork, restore, delete."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvkeep.engine.operations import OperationLog
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import best_match
from kvkeep.engine.scheduler import SchedulingPolicy
from kvkeep.engine.session_files import NOTES, other_notes
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")
_NO_EDITS = ("span", "rewind")  # changes that leave the remaining cells as they were


class SessionOperations:
    """Each operation is complete before the next one begins. Used in the engine's thread.

    `Engine` documents the methods of the same names. log: gets each operation.
    """

    def __init__(
        self,
        model: Model,
        registry: SessionRegistry,
        policy: SchedulingPolicy,
        log: OperationLog,
    ):
        self._model, self._registry, self._policy = model, registry, policy
        self._log = log

    def log(self, record: SessionRecord, what: str, tokens: int, seconds: float) -> None:
        """Log an operation that has changed a session, which is then to be saved."""
        self._registry.mark_unsaved(record)
        self._log.add(record, what, tokens, seconds)

    def create(
        self, session: Session, owner: str, name: str | None, notes: dict[str, Any] | None
    ) -> SessionRecord:
        if any(record.session is session for record in self._registry):
            raise InvalidArgument("the engine has that session already; give it a fork of it")
        record = self._add(session, owner, name, notes=notes)
        self.log(record, "create", 0, 0.0)
        return record

    def prepare(self, prompt: Sequence[int], name: str, owner: str, new: Session) -> int:
        """new: an empty session for the owner."""
        existing = self._registry.find(name, owner) if self._registry.has(name, owner) else None
        if existing:
            existing.require_idle()
            self._registry.reserve(existing, 0)
        target = existing or SessionRecord("", owner, False, None, new)
        match = best_match(prompt, self._registry.of(owner), new, target)
        source = match.record
        if match.whole and source is existing and existing:
            existing.live.draw_anew()
            return match.tokens
        session = source.live.beginning(match.tokens) if source else new
        if existing:
            record = existing
            record.session, record.edit = session, ""
            record.mark_changed()
        else:
            record = self._add(session, owner, name)
        record.exact_tokens = min(source.exact_tokens, match.tokens) if source else 0
        record.sampled_length = match.tokens if match.whole else 0
        return match.tokens

    def set_notes(self, name: str, owner: str, notes: dict[str, Any]) -> None:
        record = self._registry.find(name, owner)
        record.notes = {**record.notes, **notes}
        self._metadata_changed(record)

    def pin(self, name: str, owner: str, pinned: bool, revision: int | None) -> None:
        record = self._registry.find(name, owner)
        record.require_revision(revision)
        record.pinned = pinned
        self._metadata_changed(record)

    def inspect(self, name: str, owner: str, function: Callable[[SessionRecord], T]) -> T:
        record = self._registry.find(name, owner)
        self._registry.reserve_idle(record)
        return function(record)

    def change(
        self,
        name: str,
        owner: str,
        what: str,
        function: Callable[[Session], T],
        revision: int | None,
        adds: int,
    ) -> T:
        record = self._registry.find(name, owner)
        record.require_idle()
        record.require_revision(revision)
        self._registry.reserve(record, adds)
        began, before = time.perf_counter(), len(record.live.tokens)
        record.activity = "changing"
        try:
            result = function(record.live)
        finally:
            record.activity = "idle"
        record.mark_changed("" if what in _NO_EDITS else what)
        added = len(record.live.tokens) - before
        if added < 0:
            record.truncated(len(record.live.tokens))
        self.log(record, what, added, time.perf_counter() - began)
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
        record = self._registry.find(name, owner)
        record.require_revision(revision)
        self._registry.reserve_idle(record)
        notes = dict(record.notes) if notes is None else notes
        fork = self._add(record.live.fork(at), owner, new, record.name, notes)
        fork.exact_tokens, fork.sampled_length = record.exact_tokens, record.sampled_length
        fork.edit = record.edit
        if at is not None and at < len(record.live.tokens):
            fork.truncated(at)
        self.log(fork, "fork", 0, 0.0)
        return fork

    def restore(
        self, snapshot: Snapshot, owner: str, name: str | None, replace: bool
    ) -> SessionRecord:
        session = self._model.restore(snapshot)
        if replace and name is not None and self._registry.has(name, owner):
            record = self._registry.find(name, owner)
            record.require_idle()
            record.session = session
            record.mark_changed()
            self._registry.reserve(record, 0)
        else:
            record = self._add(session, owner, name)
        record.notes = other_notes(snapshot.notes)
        record.derive_from(snapshot.notes.get(NOTES, {}))
        self.log(record, "restore", 0, 0.0)
        return record

    def delete(self, name: str, owner: str, revision: int | None) -> None:
        record = self._registry.find(name, owner)
        record.require_revision(revision)
        self._registry.remove(record)
        self._log.add(record, "delete", 0, 0.0)

    def _add(
        self,
        session: Session,
        owner: str,
        name: str | None,
        parent: str | None = None,
        notes: dict[str, Any] | None = None,
    ) -> SessionRecord:
        """Register a named session. Raises NoRoom if the owner has as many as the limit allows."""
        self._policy.admit_session(self._registry.of(owner))
        return self._registry.add(session, owner, name, parent, notes=notes)

    def _metadata_changed(self, record: SessionRecord) -> None:
        """Begin a new revision, with which notes and pins are saved."""
        self._registry.reserve_idle(record)
        record.mark_changed()
        self._registry.mark_unsaved(record)
