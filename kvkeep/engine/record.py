"""The record of a session in an engine: its name and owner, where it is, and how it was made."""

import logging
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep.engine.memory_bound import MemoryBound
from kvkeep.engine.session_files import (
    ENGINE_NOTES_KEY,
    LaterFields,
    SessionFile,
    notes_of_copy,
)
from kvkeep.engine.steps import StepGrid
from kvkeep.engine.usage import LastAnswer
from kvkeep.errors import Busy, InvalidArgument, StoreError, WrongRevision
from kvkeep.session.session import Session

_log = logging.getLogger("kvkeep.engine")

_GENERATED_NAME = re.compile(r"(s-|resp_)[0-9a-f]{16,}")  # by a registry, or for a response
_RESPONSE_NAME = re.compile(r"resp_[0-9a-f]{24}")

Activity = Literal["idle", "generating", "changing"]

# Fields that a snapshot's notes hold, by their keys there, which are part of the file format.
_NOTED_FIELDS = {
    "evaluated": "step_aligned_tokens",
    "steps": "steps",
    "sampled": "sampled_length",
    "droppable": "droppable_tokens",
    "changed": "first_edit",
    "parent": "parent",
    "pinned": "resident",
    "created": "created",
    "title": "title",
}


def is_response_name(name: str) -> bool:
    """Whether a session by that name is of a response, which its server stores and drops."""
    return _RESPONSE_NAME.fullmatch(name) is not None


@dataclass(eq=False)
class SessionRecord:
    """A session, in memory or on disk. Unnamed ones are created for a prompt, and evicted first."""

    name: str
    owner: str  # only requests of this owner see the session
    named: bool  # created by name, and kept until it is deleted
    file: SessionFile | None  # where it is saved; None for memory alone
    session: Session | None  # None while it is on disk only
    revision: int = 0  # grows with each change
    saved_revision: int | None = None  # the one on disk
    file_bytes: int = 0  # of the file with that revision
    saving_revision: int | None = None  # the one that is being written, or was last
    save_failed_at: float = math.inf  # time of the last save, if it failed
    resident: bool = False  # not evicted from memory, unless it may be lost
    pinned_until: float = 0.0  # by prefix pins, on their clock
    parent: str | None = None  # name of the session that it was forked from
    title: str | None = None  # for people, such as the beginning of a conversation
    # How many of the first tokens were evaluated in whole prefill steps. Any text that begins with
    # them would get the same cells, to the bit.
    step_aligned_tokens: int = 0
    steps: str = ""  # of the engine that evaluated it: see `StepGrid.name`
    has_other_steps: bool = False  # than this engine's, so that no others reuse its cells
    sampled_length: int = 0  # tokens held when the newest one was sampled; 0 for none
    # How many of those a prompt may lack that continues the answer: an end token, for example.
    droppable_tokens: int = 0
    first_edit: str = ""  # the first operation that did more than append; "" for none
    bound: MemoryBound | None = None  # of its memory, while it is on disk only; None if unknown
    file_rounded: str = ""  # the codec that rounded the cells of the file, while it is on disk only
    lost_revision: int | None = None  # unsaved, in an engine that was killed
    borrowed: bool = (
        False  # saved in a shared store of several servers, not in this engine's folder
    )
    hold_count: int = 0  # callers that need it to stay in this engine
    ephemeral: bool = False  # named, but neither saved nor protected from eviction
    notes: dict[str, Any] = field(default_factory=dict)  # JSON values of its creator
    later: LaterFields | None = None  # that are on disk in the marker, and not in the file
    removed: bool = False  # deleted
    activity: Activity = "idle"
    last_prompt: Mapping[str, Any] | None = None  # JSON: what was reused of it, if there was one
    last_answer: LastAnswer | None = None
    reserved_bytes: int = 0  # bytes that it can take while it is busy
    created: float = field(default_factory=time.time)
    last_changed: float = field(default_factory=time.monotonic)
    last_used: float = field(default_factory=time.monotonic)  # maybe by an earlier process

    @property
    def live(self) -> Session:
        """The session, which must be in memory."""
        assert self.session is not None, "the session must be loaded first"
        return self.session

    @property
    def pinned(self) -> bool:
        """Deprecated: use `resident`."""
        message = "SessionRecord.pinned is deprecated: use SessionRecord.resident"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.resident

    @property
    def has_tokens(self) -> bool:
        """Whether the session is not empty; False if it is on disk only and this is unknown."""
        if self.session is not None:
            return bool(self.session.tokens)
        return self.bound is not None and self.bound.cells > 0

    def suggest_title(self, title: str) -> None:
        """Set a title if there is none, and the name was generated."""
        if title and self.title is None and _GENERATED_NAME.fullmatch(self.name):
            self.title = title

    @property
    def rounded(self) -> str:
        """The codec that rounded its cells, or ""."""
        return self.file_rounded if self.session is None else self.session.core.state.rounded

    @property
    def busy(self) -> bool:
        return self.activity != "idle"

    @property
    def dirty(self) -> bool:
        """Whether memory holds changes that are not on disk."""
        return self.named and self.session is not None and self.saved_revision != self.revision

    @property
    def kept_bytes(self) -> int:
        """Bytes on disk, as far as is known: with unsaved changes those of the cells in memory."""
        if self.session is not None and (self.dirty or self.file is None):
            return self.session.nbytes
        return self.file_bytes

    @property
    def may_be_lost(self) -> bool:
        """Whether eviction may lose it although it has a name."""
        return self.borrowed or self.ephemeral

    @property
    def evictable(self) -> bool:
        """Whether it is idle in memory, and may be lost or can be loaded again."""
        if self.session is None or self.busy or self.hold_count:
            return False
        if self.may_be_lost:
            return True
        return not self.resident and (not self.named or self.file is not None)

    def snapshot_notes(self) -> dict[str, Any]:
        """Return the notes to save in a snapshot, for `restore_from` of another record."""
        fields = {key: getattr(self, name) for key, name in _NOTED_FIELDS.items()}
        used = time.time() - (time.monotonic() - self.last_used)
        engine_notes = {"name": self.name, "revision": self.revision, "used": used, **fields}
        return {**self.notes, ENGINE_NOTES_KEY: engine_notes}

    def restore_use(self, used: float) -> None:
        """Set the time of the last use. used: in seconds since 1970; one in the future is now."""
        self.last_used = time.monotonic() - max(0.0, time.time() - used)

    def restore_from(self, notes: Mapping[str, Any]) -> None:
        """Set the fields to those in the notes of the session's own snapshot."""
        fields = self._restore_notes(notes)
        self.revision = self.saved_revision = fields.get("revision", 0)
        for key, name in _NOTED_FIELDS.items():
            setattr(self, name, fields.get(key, getattr(self, name)))
        self.steps = fields.get("steps", "")
        if self.session is not None:
            self.compare_steps()

    def derive_from(self, notes: Mapping[str, Any]) -> None:
        """Set the fields of a new session that begins with the snapshot of another session."""
        fields = self._restore_notes(notes)
        self.step_aligned_tokens = fields.get("evaluated", 0)
        self.sampled_length = fields.get("sampled", 0)
        self.droppable_tokens = fields.get("droppable", 0)
        self.first_edit = fields.get("changed", "")
        self.parent = fields.get("name")
        self.steps = fields.get("steps", "")
        self.compare_steps()

    def replace_session(self, session: Session) -> None:
        """Replace the session by another one, and reset what is recorded about its text."""
        self.session, self.steps, self.has_other_steps = session, StepGrid.of(session).name, False
        self.forget_text()
        self.mark_changed()

    def forget_text(self) -> None:
        """Forget how the text was evaluated and answered: another one takes its place."""
        self.first_edit = ""
        self.step_aligned_tokens = self.sampled_length = self.droppable_tokens = 0
        self.last_answer = self.last_prompt = None

    def compare_steps(self) -> None:
        """Forget `step_aligned_tokens` that were evaluated in other steps than this engine's."""
        own_steps = StepGrid.of(self.live).name
        if self.steps != own_steps:
            self.steps, self.step_aligned_tokens, self.has_other_steps = own_steps, 0, True

    def _restore_notes(self, notes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the creator's values of a snapshot's notes; return the engine's fields."""
        self.notes = notes_of_copy(notes)
        fields: Mapping[str, Any] = notes.get(ENGINE_NOTES_KEY, {})
        return fields

    def require_file(self) -> SessionFile:
        if not self.named:
            raise InvalidArgument(
                f"session {self.name!r} has no name of its own: only sessions that were created by "
                "name are saved. Fork it under a name, and save the fork"
            )
        if self.file is None:
            raise InvalidArgument(
                f"session {self.name!r} cannot be saved: the engine has no folder for sessions"
            )
        return self.file

    def mark_saved(self, revision: int) -> None:
        """Note that a revision is on disk.

        If the session was removed meanwhile, another one may have its name, and the marker.
        """
        if self.removed:
            return
        self.saved_revision = max(revision, self.saved_revision or 0)
        if self.file is not None:
            self.file_bytes = self.file.nbytes
            if self.later is not None and revision >= self.later.revision:
                self.later = None
            if not self.dirty and self.later is None:
                self.file.clear_marker()

    def mark_unsaved(self) -> None:
        """Write a marker of the change, in case the engine is killed before the save.

        The change is made already: without a marker, as on a full disk, a kill would only not be
        reported.
        """
        if self.file is None or self.session is None:  # `change_fields` has written it
            return
        try:
            self.file.write_marker(self.revision, len(self.live.tokens), self.later)
        except OSError as error:
            _log.warning("session %r could not be marked as unsaved: %s", self.name, error)

    def require_idle(self) -> None:
        if self.busy:
            raise Busy(f"session {self.name!r} is {self.activity}; wait, or cancel the request")

    def require_revision(self, expected: int | None) -> None:
        if expected is not None and expected != self.revision:
            raise WrongRevision(
                f"session {self.name!r} is at revision {self.revision}, not {expected}: fetch it "
                "again before you change it"
            )

    def end_of_last_step(self, token_count: int) -> int:
        """Return the end of the last whole prefill step of the first `token_count` tokens."""
        return StepGrid.of(self.live).last_end(self.live.tokens, token_count)

    def lower_token_counts(self, length_before: int) -> None:
        """Lower `step_aligned_tokens` and `sampled_length` if tokens were removed.

        The logits of the new last token were computed by evaluating that token alone. The last
        answer is dropped if tokens up to its end are missing.
        """
        length = len(self.live.tokens)
        if length >= length_before:
            return
        if length <= self.step_aligned_tokens:
            self.step_aligned_tokens = self.end_of_last_step(max(0, length - 1))
        if length <= self.sampled_length:
            self.sampled_length = self.droppable_tokens = 0
        if self.last_answer is not None and length < self.last_answer.length:
            self.last_answer = None

    def note_answer(self, ids: Sequence[int], num_withheld: int) -> None:
        """Note that the last tokens are an answer, whose end the next prompt may lack.

        ids: the sampled tokens. num_withheld: how many of the last ones the client did not get: an
        end token, or those of a stop string. It may also strip white space before these. The next
        prompt may have another token instead of the last remaining one, or end with it, so that it
        is evaluated again. At least one sampled token is kept.
        """
        text, num_kept = self.live.core.model.text, len(ids) - num_withheld
        while num_kept > 0 and not text.token_bytes(ids[num_kept - 1]).strip():
            num_kept -= 1
        self.sampled_length = len(self.live.tokens)
        self.droppable_tokens = len(ids) - max(1, num_kept - 1) if num_kept > 0 else 0

    def change_fields(
        self,
        *,
        title: str | None = None,
        resident: bool = False,
        notes: dict[str, Any] | None = None,
    ) -> None:
        """Change what is not of the text, to these values, in memory or on disk.

        A session on disk stays there: the marker has the fields until it is saved. Raises
        StoreError if they cannot be written; then nothing has changed.
        """
        later = LaterFields(self.revision + 1, title, resident, notes or {})
        if self.session is None:
            try:
                self.require_file().write_marker(later.revision, None, later)
            except OSError as error:
                raise StoreError(
                    f"session {self.name!r} could not be changed on disk "
                    f"({error.strerror or error}): free some space"
                ) from error
            self.later = later
        self.title, self.resident, self.notes = later.title, later.resident, later.notes
        self.mark_changed()
        if self.session is None:
            self.saved_revision = self.revision

    def take_later(self, later: LaterFields) -> None:
        """Set the fields that the marker of an earlier engine has, and the file lacks."""
        self.later, self.title, self.resident = later, later.title, later.resident
        self.notes, self.revision = later.notes, later.revision
        self.saved_revision = later.revision

    def mark_changed(self, edit: str = "") -> None:
        """Increase the revision. edit: the operation, if it did more than append."""
        self.revision += 1
        self.last_used = self.last_changed = time.monotonic()
        self.first_edit = self.first_edit or edit
