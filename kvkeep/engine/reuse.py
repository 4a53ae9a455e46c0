"""Prefix reuse: which tokens of a prompt are in the cache already, and why not more of them.

A session that holds the first tokens of a prompt, each in a cell as its tokens alone give it,
lends them up to the end of a prefill step. So a generation is the same, to the bit, whether part of
its prompt was reused or not. One exception is intended: a prompt that continues after the last
sampled token of a session, as the next turn of a chat does, keeps all cells of the session, those
of sampled tokens too. They are what the model read when it generated them; evaluated as a prompt
they would differ by rounding. A session that ends with a token of a prompt is no exception: the
last step of that prompt ended where no step of a longer prompt does.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvkeep.engine.events import Reuse
from kvkeep.engine.record import SessionRecord
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.block import CellBlocks, PrefixCache, PrefixMatch
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint

# Why no more of a prompt was reused.
MissReason = Literal[
    "",
    "cold",  # no text begins like it
    "differs",  # the nearest text continues differently
    "below_step",  # the common tokens end within a prefill step
    "forgotten",  # this and the next three: the cells are no longer those that the tokens give
    "compressed",
    "quantised",
    "edited",
    "written",  # the tokens were sampled, not prefilled
    "settings",  # the session's policy, prefill step or bits differ
]

_SHOWN_TOKENS = 40  # on each side of a difference
_miss_numbers = itertools.count(1)


@dataclass(frozen=True)
class Match:
    """The session that a prompt reuses most of."""

    record: SessionRecord | None = None  # lends its first `tokens`; None for no session
    tokens: int = 0
    resumes_session: bool = False  # the prompt continues after the session's last, sampled token
    common: int = 0  # first tokens that the nearest text shares with the prompt
    reason: MissReason = "cold"
    nearest: Sequence[int] | None = None  # that text; None if no text begins like the prompt

    def reuse(self, prompt: Sequence[int]) -> Reuse:
        """Describe what of the prompt is reused, and why not more."""
        differs_at = self.common if self.common < len(prompt) else None
        if self.record is None:
            return Reuse(0, "", self.reason, differs_at)
        return Reuse(self.tokens, "session", self.reason, differs_at, self.record.name)

    def session(self, empty: Session) -> Session:
        """Return a session that holds the reused tokens: `empty` if there are none."""
        return self.record.live.beginning(self.tokens) if self.record else empty

    def describe(self, record: SessionRecord) -> None:
        """Note on the record of such a session how its tokens were evaluated."""
        record.exact_tokens = min(self.record.exact_tokens, self.tokens) if self.record else 0
        record.sampled_length = self.tokens if self.resumes_session else 0


@dataclass(frozen=True)
class TextDifference:
    """The first difference of a prompt and the nearest text, at token `at`."""

    start: int
    at: int
    prompt: tuple[int, ...]  # from token `start` on
    nearest: tuple[int, ...]


@dataclass(frozen=True)
class CacheMiss:
    """A prompt that was not continued in a session."""

    number: int
    when: float  # seconds since 1970
    tokens: int  # of the prompt
    reuse: Reuse
    difference: TextDifference | None  # None if no text begins like the prompt


class WholeSteps:
    """A `PrefixCache` that truncates hits to the end of a prefill step.

    The rest of a prompt is then evaluated in the same steps as without a store. There are no hits
    where no multiple of the step within the prompt is one of a block (256 tokens), too.
    """

    def __init__(self, store: PrefixCache, step: int):
        """step: the prefill step of the session, in tokens."""
        self._store, self._step = store, step

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest stored prefix that ends at a step. Raises StoreError."""
        match = self._store.find(fingerprint, tokens)
        count = len(match.keys)
        while count * BLOCK_TOKENS % self._step:
            count -= 1
        return PrefixMatch(match.keys[:count], match.values[:count], match.differs_at)

    def add(
        self, fingerprint: Fingerprint, tokens: Sequence[int], start: int, blocks: CellBlocks
    ) -> int:
        """Store the blocks, all of them. Raises StoreError."""
        return self._store.add(fingerprint, tokens, start, blocks)


def best_match(
    prompt: Sequence[int],
    candidates: Iterable[SessionRecord],
    required: Session,
    target: SessionRecord | None = None,
) -> Match:
    """Return the match of the session that the prompt reuses most of.

    candidates: of the owner of the prompt; those on disk only are skipped. required: a session
    with the settings that the prompt needs. target: the session that takes the prompt; None if any
    unnamed session may take it, and does so where it is the best match.
    """
    ids = np.asarray(prompt, dtype=np.int32)
    best = Match()
    for record in candidates:
        if record.session is None:
            continue
        in_place = record is target if target is not None else not record.named
        match = _match_record(ids, record, required, in_place)
        if (match.tokens, match.common) > (best.tokens, best.common):
            best = replace(match, nearest=record.live.tokens)
    return best


def text_difference(prompt: Sequence[int], match: Match) -> TextDifference | None:
    """Return where a prompt differs from the nearest text; None if it does not."""
    if match.nearest is None or match.common >= len(prompt):
        return None
    start, end = max(0, match.common - _SHOWN_TOKENS), match.common + _SHOWN_TOKENS
    nearest = tuple(match.nearest[start:end])
    return TextDifference(start, match.common, tuple(prompt[start:end]), nearest)


def cache_miss(prompt: Sequence[int], match: Match) -> CacheMiss:
    """Describe why no more of a prompt was reused than `match` says."""
    reuse, difference = match.reuse(prompt), text_difference(prompt, match)
    return CacheMiss(next(_miss_numbers), time.time(), len(prompt), reuse, difference)


def _match_record(
    ids: NDArray[np.int32], record: SessionRecord, required: Session, in_place: bool
) -> Match:
    """in_place: whether the session itself would take the prompt, rather than a copy of it."""
    session = record.live
    # No more of it than the prompt is long: a session's text may be much longer.
    session_ids = np.frombuffer(session.tokens.first(len(ids)).array(), dtype=np.int32)
    differs = ids[: len(session_ids)] != session_ids
    common = int(differs.argmax()) if differs.any() else len(session_ids)
    if common == 0:
        return Match()
    if _settings(session) != _settings(required):
        return Match(common=common, reason="settings")
    resumable = not record.busy and not record.edit
    # The last token was sampled. At least one token is evaluated, for its logits.
    continues = common == record.sampled_length == len(session.tokens) < len(ids)
    if resumable and continues and (in_place or session.holds_all):
        return Match(record, common, True, common, "differs")
    exact, reason = _exact_tokens(record, min(common, len(ids) - 1))
    tokens = record.whole_steps(exact)
    if not tokens:
        return Match(common=common, reason=reason or "below_step")
    return Match(record, tokens, False, common, reason or "differs")


def _exact_tokens(record: SessionRecord, limit: int) -> tuple[int, MissReason]:
    """Return how many of the first `limit` cells depend on their tokens alone, and why no more."""
    session, cache = record.live, record.live.cache
    if record.edit:
        return 0, "edited"
    if any(segment.compressed for segment in cache.segments):
        return 0, "compressed"
    if cache.layout.quantised or cache.far_layout.quantised:
        return 0, "quantised"
    if cache.cells < len(session.tokens) or cache.local is not None or cache.recurrent:
        return 0, "forgotten"
    window = next((segment.length for segment in cache.segments if not segment.anchor), 0)
    anchors = sum(segment.length for segment in cache.segments if segment.anchor)
    limit = min(limit, window + anchors)
    # The last step of a prompt is rarely whole: less than a step beyond is not worth a reason.
    sampled = limit >= record.exact_tokens + session.prefill_step
    return min(limit, record.exact_tokens), "written" if sampled else ""


def _settings(session: Session) -> tuple[object, ...]:
    keep = session.keep if session.keep >= 0 else None
    return (session.core.memory.policy, session.bits, session.prefill_step, keep)
