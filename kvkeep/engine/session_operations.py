"""Operations on an engine's sessions by name."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from types import MappingProxyType
from typing import Any, TypeVar

from kvkeep.engine.in_place import match_prompt
from kvkeep.engine.operations import OperationLog
from kvkeep.engine.pins import PrefixPin
from kvkeep.engine.preparing import prepare_named
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import ReuseReport
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.checkpoints import num_rewindable
from kvkeep.session.session import Session
from kvkeep.session.token_diff import common_length
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")
_COMPACTED = "compact"  # the operation by which a session was compacted
_CELL_PRESERVING = ("span", "rewind")  # operations that leave the remaining cells as they were


class SessionOperations:
    """The methods of `Engine` on sessions. They run one after the other in its thread."""

    def __init__(
        self,
        registry: SessionRegistry,
        log: OperationLog,
        new_session: Callable[..., Session],
        alignment: AlignmentOptions,
    ):
        """new_session: creates one for an owner, with settings that replace the engine's.
        alignment: of prompts, unless another one is asked for."""
        self._alignment = alignment
        self._registry, self._operation_log, self._new_session = registry, log, new_session

    def sessions(self, owner: str = "0", unnamed: bool = False) -> list[SessionRecord]:
        """Return an owner's named sessions, or all of them: read-only, the last used first."""
        return [record for record in self._registry.owned_by(owner) if record.named or unnamed]

    def find(self, name: str, owner: str = "0") -> SessionRecord:
        """Return a session, in memory or not; read-only. Raises NoSuchSession."""
        return self._registry.find(name, owner)

    def use(self, name: str, owner: str = "0") -> SessionRecord:
        """Return a session as `find` does, which counts as the last used one from then on."""
        record = self._registry.find(name, owner)
        record.last_used = time.monotonic()
        return record

    def explain(
        self, prompt: Sequence[int], owner: str = "0", alignment: AlignmentOptions | None = None
    ) -> ReuseReport:
        """Return how much of a prompt would be reused, and why not more.

        alignment: as of a request; None for the engine's default.
        """
        empty_session, records = self._new_session(owner), self._registry.owned_by(owner)
        return match_prompt(prompt, records, empty_session, alignment or self._alignment)[2]

    def pins(self, owner: str = "0") -> list[PrefixPin]:
        """Return an owner's pins of prefixes, those that expire first at the beginning."""
        return self._registry.pins.owned_by(owner)

    def release_pin(self, pin_id: str, owner: str = "0") -> PrefixPin:
        """Remove a pin of a prefix; its session stays until it is evicted. Raises NoSuchPin."""
        return self._registry.pins.release(pin_id, owner)

    def create(
        self,
        /,
        owner: str = "0",
        name: str | None = None,
        session: Session | None = None,
        notes: dict[str, Any] | None = None,
        title: str | None = None,
        **settings: Any,
    ) -> SessionRecord:
        """Register a session, or create one with settings as of `Model.session`."""
        if session is None:
            session = self._new_session(owner, **settings)
        elif any(record.session is session for record in self._registry):
            raise InvalidArgument("this session is already in the engine; add a fork of it instead")
        record = self._registry.add(session, owner, name)
        record.notes, record.title = notes or {}, title
        self._operation_log.add(record, "create")
        return record

    def prepare(self, prompt: Sequence[int], name: str, owner: str = "0") -> int:
        """Make a named session hold the longest cached prefix of a prompt, and nothing else.

        The prefix is from any session of the owner (`kvkeep.engine.reuse`). Creates the session if
        it is missing. Returns the length of the prefix in tokens.
        """
        exact, new_session = AlignmentOptions(), self._new_session
        prepared = prepare_named(self._registry, prompt, name, owner, new_session, exact)
        prepared.start()
        prepared.extend_pins(self._registry.pins)
        self._registry.pins.keep_to_text(prepared.record)
        return prepared.reuse.tokens

    def continue_compacted(
        self, prompt: Sequence[int], name: str, handle: str, owner: str = "0"
    ) -> int:
        """Create a session that continues a compacted one, or one that continued it before.

        handle: the compacted session's name, and its snapshot's label where servers share a store.
        Returns how many first tokens of the prompt the new session holds; 0, and no session, if
        there is none that begins like the prompt.
        """
        with suppress(KvkeepError):  # it may be missing, damaged, or too large
            if self._registry.disk.shares_snapshots and self._registry.get(handle, owner) is None:
                self.restore(handle, owner, handle)
            self._registry.load_existing(handle, owner)
        best: tuple[int, SessionRecord] | None = None
        for record in self._registry.owned_by(owner):
            if record.session is None or record.busy or record.first_edit != _COMPACTED:
                continue
            common = common_length(record.live.tokens.array(), prompt[:-1])
            removed, memory = len(record.live.tokens) - common, record.live.core.memory
            # Of a text that differs early, exact reuse may hold more.
            is_usable = removed < common and (not removed or removed < num_rewindable(memory))
            if is_usable and (best is None or common > best[0]):
                best = common, record
        if best is None:
            return 0
        common, record = best
        fork = self._registry.add(record.live.fork(common), owner, name)
        fork.parent, fork.first_edit = record.name, _COMPACTED
        self._operation_log.add(fork, "fork")
        return common

    def set_notes(self, name: str, owner: str, notes: dict[str, Any]) -> None:
        """Add JSON values to a session's notes; they replace values of the same keys."""
        record = self._registry.find(name, owner)
        all_notes = {**record.notes, **notes}
        record.change_fields(title=record.title, resident=record.resident, notes=all_notes)
        record.mark_unsaved()

    def set_resident(
        self, name: str, owner: str, resident: bool, revision: int | None = None
    ) -> SessionRecord:
        """Set whether a session is resident, and return its record.

        A resident session is not evicted from memory, unless it is borrowed or ephemeral. One on
        disk stays there until it is used.
        """
        record = self._registry.find(name, owner, revision)
        if record.resident != resident:
            record.change_fields(title=record.title, resident=resident, notes=record.notes)
            self._operation_log.add(record, "resident")
            self._registry.releases.notify()
        return record

    def set_title(
        self, name: str, owner: str, title: str | None, revision: int | None = None
    ) -> SessionRecord:
        """Set the title of a session, None for its name, and return it. It may be busy."""
        record = self._registry.find(name, owner, revision)
        if record.title != title:
            record.change_fields(title=title, resident=record.resident, notes=record.notes)
            self._operation_log.add(record, "title")
        return record

    def inspect(self, name: str, owner: str, function: Callable[[SessionRecord], T]) -> T:
        """Load a session and return `function(record)`, which must not change it."""
        return function(self._registry.load_existing(name, owner))

    def change(
        self,
        name: str,
        owner: str,
        kind: str,
        function: Callable[[Session], T],
        revision: int | None = None,
        new_tokens: int = 0,
        notes: Mapping[str, Any] = MappingProxyType({}),
    ) -> T:
        """Change a session by a function, and return the function's result.

        kind: the operation's name in the log, such as "edit". revision: that the session must have.
        new_tokens: the most that the function adds. notes: to add to the session's notes once it is
        changed, as of `set_notes`. A function of `Engine.change_in_steps` must change the session
        at its end, as a whole, since others read it meanwhile. One that changes nothing leaves the
        revision. Raises Busy, NoSuchSession, WrongRevision, NoRoom.
        """
        record = self._registry.load_idle(name, owner, revision, new_tokens)
        start, length_before = time.perf_counter(), len(record.live.tokens)
        state_before, record.activity = record.live.core.state, "changing"
        notes_before = record.notes
        try:
            result = function(record.live)
            record.notes = {**record.notes, **notes}
        finally:  # a function that fails may have made a part of its changes
            record.activity = "idle"
            self._registry.releases.notify()
            has_other_state = record.live.core.state is not state_before
            if has_other_state or record.notes != notes_before:
                is_edited = kind not in _CELL_PRESERVING and has_other_state
                record.mark_changed(kind if is_edited else "")
                record.lower_token_counts(length_before)
                self._registry.pins.keep_to_text(record)
                added_tokens = len(record.live.tokens) - length_before
                self._operation_log.add(record, kind, added_tokens, time.perf_counter() - start)
        return result

    def fork(
        self,
        name: str,
        owner: str = "0",
        at: int | None = None,
        new_name: str | None = None,
        revision: int | None = None,
        notes: dict[str, Any] | None = None,
        title: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> SessionRecord:
        """Create a session from another or its first `at` tokens. notes, title: None to copy.

        progress: see `Session.fork`; it may change the other session.
        """
        record = self._registry.load_existing(name, owner, revision)
        source, num_tokens = copy(record), len(record.live.tokens)
        fork = self._registry.add(record.live.fork(at, progress), owner, new_name)
        fork.notes = dict(source.notes) if notes is None else notes
        fork.title = source.title if title is None else title
        fork.parent = source.name
        _copy_history(source, fork)
        fork.lower_token_counts(num_tokens)
        self._operation_log.add(fork, "fork")
        return fork

    def revert(self, name: str, owner: str, to: str, revision: int | None = None) -> SessionRecord:
        """Replace a session's text, notes and title by those of another one, such as a fork of it.

        Its name, parent and creation stay, and the revision goes on. Raises as `change`.
        """
        record = self._registry.find(name, owner)
        record.require_idle()
        record.require_revision(revision)
        source = self._registry.load_existing(to, owner)
        if source is record:
            raise InvalidArgument("a session cannot be reverted to itself; name a fork of it")
        self._replace_session(record, source.live.fork())
        record.notes, record.title = dict(source.notes), source.title
        _copy_history(source, record)
        self._operation_log.add(record, "revert")
        return record

    def _replace_session(self, record: SessionRecord, session: Session) -> None:
        """Put a session in the place of an idle record's one; that stays if there is no room."""
        previous_session, record.session = record.session, session
        try:
            self._registry.reserve(record, 0)
        except BaseException:
            record.session = previous_session
            raise
        record.replace_session(session)
        self._registry.pins.keep_to_text(record)

    def restore(
        self,
        snapshot: str | Snapshot,
        owner: str = "0",
        name: str | None = None,
        replace: bool = False,
    ) -> SessionRecord:
        """Create a session from a snapshot or its label.

        replace: whether an existing session of that name is replaced; it stays if this fails.
        """
        if not isinstance(snapshot, Snapshot):
            snapshot = Snapshot.load(
                self._registry.disk.snapshots_of(owner).existing_path(snapshot)
            )
        session = self._registry.disk.restored(snapshot, owner)
        record = self._registry.get(name, owner) if replace and name else None
        if record:
            record.require_idle()
            self._replace_session(record, session)
        else:
            record = self._registry.add(session, owner, name)
        record.derive_from(snapshot.notes)
        self._operation_log.add(record, "restore")
        return record

    def drop_cells(self, name: str, owner: str, notes: Mapping[str, Any]) -> None:
        """Make a session empty: its notes stay, and those given are added. Raises Busy.

        It counts as unused since before.
        """
        record = self._registry.find(name, owner)
        record.require_idle()
        self._registry.pins.detach(record)
        last_used, record.notes = record.last_used, {**record.notes, **notes}
        record.replace_session(self._new_session(owner))
        record.last_used = last_used
        self._operation_log.add(record, "empty")

    def delete(self, name: str, owner: str = "0", revision: int | None = None) -> None:
        """Delete a session, also on disk. Raises Busy while it has a generation."""
        record = self._registry.find(name, owner, revision)
        self._registry.remove(record)
        self._operation_log.add(record, "delete")


def _copy_history(source: SessionRecord, target: SessionRecord) -> None:
    """Copy what is recorded of a text's evaluation, edits and answers to the record of a fork."""
    target.first_edit = source.first_edit
    target.step_aligned_tokens = source.step_aligned_tokens
    target.has_other_steps = source.has_other_steps
    target.sampled_length = source.sampled_length
    target.droppable_tokens = source.droppable_tokens
    target.last_answer = source.last_answer
