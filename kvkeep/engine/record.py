"""The record of a session in an engine: its name and owner, where it is, and its memory bound."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep.cache.segment import GROWTH
from kvkeep.engine.session_files import NOTES, SessionFile, other_notes
from kvkeep.errors import Busy, InvalidArgument, WrongRevision
from kvkeep.session.session import Session

# Storage exceeds the cells of a budget by at most this factor, whatever was edited, pinned or
# forked. Growing storage exceeds the held cells by no more than that, or by a few cells.
_STORAGE_FACTOR = 9 / 8
STEP = 128  # default prefill step in tokens: running generations decode one token between two steps
_SHALLOW_STEPS = 12  # prefill steps after which the step size is halved

# What the engine is doing in a session.
Activity = Literal["idle", "generating", "changing"]

# Fields that a snapshot's notes hold, by their keys there, which are part of the file format.
_NOTED_FIELDS = {
    "evaluated": "exact_tokens",
    "sampled": "sampled_length",
    "changed": "edit",
    "parent": "parent",
    "pinned": "pinned",
    "created": "created",
}


@dataclass(eq=False)
class SessionRecord:
    """A session, in memory or on disk. Unnamed ones are created for a prompt, and evicted first."""

    name: str
    owner: str  # only requests of this owner see the session
    named: bool  # created by name, and kept until it is deleted
    file: SessionFile | None  # where it is saved; None for memory alone
    session: Session | None  # None while it is on disk only
    revision: int = 0  # grows with each change
    saved_revision: int | None = None  # on disk; None for none
    saving_revision: int | None = None  # being written; None for none
    pinned: bool = False  # stays in memory
    parent: str | None = None  # the session that it was forked from
    # The first tokens that were evaluated in whole prefill steps. Any text that begins with them
    # would get the same cells, to the bit.
    exact_tokens: int = 0
    sampled_length: int = 0  # tokens held when the newest one was sampled; 0 for none
    edit: str = ""  # the operation that changed it other than by appending; "" for none
    # Of a session found on disk: the unsaved revision that a killed engine had reached.
    lost_revision: int | None = None
    borrowed: bool = False  # its home is a store elsewhere, which has it while `leases` is 0
    leases: int = 0  # callers that need it to stay here
    evictable: bool = False  # may be dropped to make room although it has a name
    notes: dict[str, Any] = field(default_factory=dict)  # JSON values of its creator
    removed: bool = False  # deleted
    activity: Activity = "idle"
    reserved: int = 0  # bytes that it may come to take while it is busy
    created: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> Session:
        """The session, which must be in memory."""
        assert self.session is not None, "loaded before it is used"
        return self.session

    @property
    def busy(self) -> bool:
        return self.activity != "idle"

    @property
    def dirty(self) -> bool:
        """Whether memory holds changes that are not on disk."""
        return self.named and self.session is not None and self.saved_revision != self.revision

    @property
    def expendable(self) -> bool:
        """Whether it may be dropped to make room although it has a name."""
        return self.borrowed or self.evictable

    @property
    def can_leave_memory(self) -> bool:
        """Whether it may be evicted, and can be loaded again if it is to be kept."""
        if self.session is None or self.busy or self.leases:
            return False
        recoverable = not self.named or self.file is not None
        return self.expendable or (recoverable and not self.pinned)

    def snapshot_notes(self) -> dict[str, Any]:
        """Return the notes of a snapshot, from which another record can `resume`."""
        fields = {key: getattr(self, name) for key, name in _NOTED_FIELDS.items()}
        noted = {"name": self.name, "revision": self.revision, **fields}
        return {**self.notes, NOTES: noted}

    def resume(self, notes: Mapping[str, Any]) -> None:
        """Continue the record that these `snapshot_notes` are of."""
        noted, self.notes = notes.get(NOTES, {}), other_notes(notes)
        self.revision = self.saved_revision = noted.get("revision", 0)
        for key, name in _NOTED_FIELDS.items():
            setattr(self, name, noted.get(key, getattr(self, name)))

    def derive_from(self, notes: Mapping[str, Any]) -> None:
        """Describe a new session that was restored from a snapshot with these notes."""
        noted, self.notes = notes.get(NOTES, {}), other_notes(notes)
        self.exact_tokens = noted.get("evaluated", 0)
        self.sampled_length = noted.get("sampled", 0)
        self.edit = noted.get("changed", "")
        self.parent = noted.get("name")

    def require_file(self) -> SessionFile:
        """Return where it is saved. Raises InvalidArgument if it is in memory alone."""
        if self.file is None:
            raise InvalidArgument(
                f"session {self.name!r} cannot be saved: the engine has no folder for sessions"
            )
        return self.file

    def mark_saved(self, revision: int) -> None:
        """Note that a revision is saved."""
        self.saved_revision = revision
        if not self.dirty and self.file is not None:
            self.file.clear_marker()

    def mark_unsaved(self) -> None:
        """Note on disk that it has changed, in case the engine is killed before the save."""
        if self.file is not None:
            self.file.write_marker(self.revision, len(self.live.tokens))

    def require_idle(self) -> None:
        """Raise Busy if a generation or a change is running in the session."""
        if self.busy:
            raise Busy(f"session {self.name!r} is {self.activity}; wait for it, or cancel it")

    def require_revision(self, expected: int | None) -> None:
        """Raise WrongRevision unless the session is at the expected revision; None for any."""
        if expected is not None and expected != self.revision:
            raise WrongRevision(
                f"session {self.name!r} is at revision {self.revision}, and the change was meant "
                f"for {expected}: look at it again"
            )

    def whole_steps(self, tokens: int) -> int:
        """Return how many of the first `tokens` lie in steps that end where any longer prompt's do.

        For example, with a prefill step of 128, 500 tokens contain 384 in whole steps.
        """
        step = prefill_step_at(self.live.prefill_step, tokens)
        return tokens // step * step

    def note_truncation(self, length_before: int) -> None:
        """Note that a shorter session was truncated, and its last token evaluated by itself."""
        tokens = len(self.live.tokens)
        if tokens >= length_before:
            return
        if tokens <= self.exact_tokens:
            self.exact_tokens = self.whole_steps(max(0, tokens - 1))
        if tokens <= self.sampled_length:
            self.sampled_length = 0

    def mark_changed(self, edit: str = "") -> None:
        """Begin a new revision. edit: the operation, if it did more than append."""
        self.revision += 1
        self.last_used = time.monotonic()
        self.edit = self.edit or edit


def prefill_step_at(step: int, position: int) -> int:
    """Return the size of the prefill step that begins at `position`.

    step: the session's prefill step. Running generations wait for a prefill step, and its attention
    takes longer the more tokens precede it; so steps are halved from the twelfth on, except for
    steps larger than the default, and odd ones, whose halves would end elsewhere. The size depends
    only on the position, so that a prompt is always evaluated in the same steps.
    """
    halved = step <= STEP and step % 2 == 0 and position >= _SHALLOW_STEPS * step
    return step // 2 if halved else step


def max_session_bytes(session: Session, tokens: int | None) -> int:
    """Return the bytes that a session's cells can take after `tokens` more; None for any number."""
    cache, budget = session.cache, session.max_kv_size
    cells = budget if tokens is None else cache.cells + tokens
    slots = min(_STORAGE_FACTOR * cells + GROWTH, _STORAGE_FACTOR * budget)
    cell = max(cache.layout.cell_bytes, cache.far_layout.cell_bytes)
    step = session.prefill_step * cache.layout.plain.cell_bytes
    total = math.ceil(slots * cell) + step
    if cache.local is not None:
        window, local_cell = cache.local.window.size or budget, cache.local.layout.cell_bytes
        total += math.ceil(min(budget, window + 128) * local_cell * _STORAGE_FACTOR)
        total += session.prefill_step * local_cell
    return max(total, cache.nbytes)
