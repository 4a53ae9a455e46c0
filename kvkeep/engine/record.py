"""A session that an engine keeps: who it is, where it is, and what it may take."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep.cache.segment import GROWTH
from kvkeep.errors import Busy, WrongRevision
from kvkeep.session.session import Session

# Storage takes no more than that over the cells of a budget, whatever was edited, pinned or forked;
# and as it grows no more than that, or a few cells, over those that are held.
_OVER = 9 / 8
STEP = 128  # tokens of a prompt between two tokens of those who write meanwhile
_SHALLOW = 12  # steps, from which on they are half as long


@dataclass(eq=False)
class SessionRecord:
    """A session under a name, in memory or on disk.

    owner: whose it is; nobody else sees it. named: whether it was asked for by name, and is kept
    until it is deleted; others make room for what is new. session: None while it is on disk alone.
    revision: grows with each change. saved, saving: the revision that is on disk, and the one on
    its way there; None for none. pinned: it stays in memory. answer: what is at work in it.
    evaluated: how many of its first tokens were evaluated in whole steps, so that any text that
    begins like it would have got the same cells, to the bit. sampled: how many tokens it held when
    the newest one was sampled; 0 where none was. changed: how it was changed by other
    than adding to its end. lost_revision: of a session found on disk, the revision that an engine
    which was killed had brought it to. visits: whether it is at home elsewhere, and whole there
    while nobody awaits it. awaited: by how many it is. passing: whether it may be lost to
    make room, though it has a name. notes: JSON values of whoever made it.
    reserved: bytes that it may come to take while it is at work. removed: whether it was deleted.
    """

    name: str
    owner: str
    named: bool
    file: Path | None
    session: Session | None
    revision: int = 0
    saved: int | None = None
    saving: int | None = None
    pinned: bool = False
    parent: str | None = None
    evaluated: int = 0
    sampled: int = 0
    changed: str = ""
    lost_revision: int | None = None
    visits: bool = False
    awaited: int = 0
    evictable: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    removed: bool = False
    answer: object | None = None
    reserved: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> Session:
        assert self.session is not None, "brought back before it is used"
        return self.session

    @property
    def busy(self) -> bool:
        return self.answer is not None

    @property
    def dirty(self) -> bool:
        """Whether what is in memory would be lost with it."""
        return self.named and self.session is not None and self.saved != self.revision

    @property
    def may_go(self) -> bool:
        """Whether it can make room for others, and be had again if it is to be kept."""
        if self.session is None or self.busy or self.awaited:
            return False
        if self.visits or self.evictable:
            return True
        return not self.pinned and (not self.named or self.file is not None)

    @property
    def ends_sampled(self) -> bool:
        """Whether its last token was sampled, and not read in a prompt or evaluated anew."""
        return 0 < self.sampled == len(self.live.tokens)

    def goes_on(self, noted: Mapping[str, Any]) -> None:
        """It is what an engine has noted of it (see `SessionRegistry.snapshot`)."""
        self.revision = self.saved = noted.get("revision", 0)
        for field_ in ("evaluated", "sampled", "changed", "parent", "pinned", "created"):
            setattr(self, field_, noted.get(field_, getattr(self, field_)))

    def require_idle(self) -> None:
        if self.busy:
            raise Busy(f"session {self.name!r} is reading or writing; wait for it, or cancel that")

    def require_revision(self, wanted: int | None) -> None:
        if wanted is not None and wanted != self.revision:
            raise WrongRevision(
                f"session {self.name!r} is at revision {self.revision}, and the change was meant "
                f"for {wanted}: look at it again"
            )

    def whole_steps(self, tokens: int) -> int:
        """Of so many first tokens those in steps that end where any longer prompt's would."""
        step = prefill_step_at(self.live.prefill_step, tokens)
        return tokens // step * step

    def stands_at(self, tokens: int) -> None:
        """It was taken back to so many tokens, of which the last was evaluated again by itself."""
        if tokens <= self.evaluated:
            self.evaluated = self.whole_steps(max(0, tokens - 1))
        if tokens <= self.sampled:
            self.sampled = 0

    def touched(self, changed: str = "") -> None:
        """It was changed."""
        self.revision += 1
        self.used = time.monotonic()
        self.changed = self.changed or changed


def prefill_step_at(step: int, position: int) -> int:
    """How many tokens of a prompt are evaluated at once there, of a session with that prefill step.

    Those who write meanwhile wait for a step, and its attention takes longer the more there is
    before it: half as many tokens, then, unless longer steps than usual were asked for, which is to
    say that nobody minds. It depends on nothing but the position, so that a prompt is always
    evaluated in the same steps. Odd steps are never halved: where they end, halves would not.
    """
    halved = step <= STEP and step % 2 == 0 and position >= _SHALLOW * step
    return step // 2 if halved else step


def max_session_bytes(session: Session, tokens: int | None) -> int:
    """Bytes that its cells can come to take once it has read and written so many more tokens.

    tokens: None for any number of them.
    """
    cache, budget = session.cache, session.max_kv_size
    held = budget if tokens is None else cache.cells + tokens
    slots = min(_OVER * held + GROWTH, _OVER * budget)
    cell = max(cache.layout.cell_bytes, cache.far_layout.cell_bytes)
    step = session.prefill_step * cache.layout.plain.cell_bytes
    total = math.ceil(slots * cell) + step
    if cache.local is not None:
        window, reads = cache.local.window.size or budget, cache.local.layout.cell_bytes
        total += math.ceil(min(budget, window + 128) * reads * _OVER) + session.prefill_step * reads
    return max(total, cache.nbytes)
