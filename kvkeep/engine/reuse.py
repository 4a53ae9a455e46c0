"""Prefix reuse: which tokens of a prompt are in the cache already, and why not more of them.

A prompt reuses the first cells of a session whose text begins like it, up to the end of a prefill
step, if these cells depend on their tokens alone: prefilled, in full precision, and never edited.
So a generation is the same, to the bit, whether part of its prompt was reused or not.

One exception is intended: a prompt that continues after the last, sampled token of a session, as
the next turn of a chat does, keeps all cells of the session. So does one that lacks only the end of
the answer, such as an end token or a stop string, which is then removed from the session. The cells
of sampled tokens were computed by decode steps; prefilled, they would differ by rounding. After a
last token that was prefilled there is no such exception, because a longer prompt has no step that
ends there.
"""

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep import validation
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.engine.memory_bound import MemoryBound
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.steps import StepGrid
from kvkeep.engine.usage import MissReason, Reuse
from kvkeep.session.checkpoints import holds_beginning, usable_checkpoint
from kvkeep.session.held_tokens import is_edited_in_place
from kvkeep.session.session import Session
from kvkeep.session.token_diff import common_length
from kvkeep.storage.prefixes.block import (
    BlockStream,
    CheckpointNeed,
    PrefixCache,
    PrefixMatch,
)
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint

_CONTEXT_TOKENS = 40  # on each side of a difference


@dataclass(frozen=True)
class Match:
    """The session of which a prompt can reuse most tokens, and how many."""

    record: SessionRecord | None = None  # None for no session
    reused_tokens: int = 0  # the first ones of its text
    common_tokens: int = 0  # how many of the first tokens the nearest text shares with the prompt
    reason: MissReason = "cold"
    nearest_text: Sequence[int] | None = None  # None if none begins like the prompt
    resumes_session: bool = False  # the prompt continues the session's answer

    def to_reuse(self, prompt: Sequence[int]) -> Reuse:
        """Return the match as it is reported to callers."""
        differs = self.nearest_text is not None and self.common_tokens < len(prompt)
        differs_at = self.common_tokens if differs else None
        if self.record is None:
            return Reuse(0, "", self.reason, differs_at)
        tokens, name = self.reused_tokens, self.record.name
        return Reuse(tokens, "session", self.reason, differs_at, name, self.resumes_session)

    def bound(self, empty_session: Session) -> MemoryBound:
        """Return the sizes of the session that `build_session` returns, or lower ones."""
        if self.record is None:
            return MemoryBound.of(empty_session)
        return MemoryBound.of(self.record.live).of_beginning(self.reused_tokens)

    def build_session(self, empty_session: Session) -> Session:
        """Return a new session that holds the reused tokens; `empty_session` if there are none."""
        return self.record.live.beginning(self.reused_tokens) if self.record else empty_session

    def take_over(self) -> bool:
        """Have the session itself end where the prompt continues it.

        Returns whether tokens were removed, of the end of its answer. A seed then gives the same
        tokens as in a new session.
        """
        assert self.record is not None, "there is a session to resume"
        session = self.record.live
        num_removed = len(session.tokens) - self.reused_tokens
        if num_removed:
            session.take_back(num_removed)
            self.record.sampled_length, self.record.droppable_tokens = self.reused_tokens, 0
            self.record.last_answer = None
        session.reset_sampler()
        return num_removed > 0

    def set_token_counts(self, new_record: SessionRecord) -> None:
        """Note in the record of a session from `build_session` how its tokens were evaluated.

        The session also keeps a checkpoint where the nearest text differs: more texts may branch
        there.
        """
        step_aligned_tokens = self.record.step_aligned_tokens if self.record else 0
        new_record.step_aligned_tokens = min(step_aligned_tokens, self.reused_tokens)
        new_record.sampled_length = self.reused_tokens if self.resumes_session else 0
        new_record.droppable_tokens = 0
        if not self.resumes_session and self.nearest_text is not None:
            grid = StepGrid.of(new_record.live)
            new_record.live.keep_checkpoint_at(grid.last_end(self.nearest_text, self.common_tokens))


@dataclass(frozen=True)
class TextDifference:
    """The first difference of a prompt and the nearest text, with the tokens around it."""

    start: int  # index of the first token of both excerpts
    at: int  # index of the first token that differs
    prompt: tuple[int, ...]  # from token `start` on
    nearest: tuple[int, ...]


@dataclass(frozen=True)
class Seam:
    """A place at which cells begin that were computed after another text."""

    at: int  # index in the prompt of the first token that differs
    removed: tuple[int, ...]  # tokens of the session's text before the seam
    inserted: tuple[int, ...]  # tokens of the prompt in their place
    reread: int  # equal tokens after them that are evaluated again


@dataclass(frozen=True)
class ReuseReport:
    """The reuse of a prompt that continues no session's answer."""

    number: int  # in order of admission; 0 for a prompt that was only explained
    when: float  # seconds since 1970
    prompt_tokens: int
    reuse: Reuse
    difference: TextDifference | None  # None if no text begins like the prompt
    seams: tuple[Seam, ...] = ()  # of a prompt that was aligned in place


class StepAlignedCache:
    """A prefix store whose hits are truncated to the end of a prefill step.

    The rest of a prompt is then evaluated in the same steps as without a store. Hits end at common
    multiples of the prefill step and the block size of the store (256 tokens). Prefixes that were
    evaluated in other steps, as by an earlier version, are other prefixes.
    """

    def __init__(self, store: PrefixCache, grid: StepGrid):
        self._store, self._prefill_step, self._steps = store, grid.prefill_step, grid.name

    @property
    def rounds(self) -> bool:
        """Whether the cells of the store are rounded by a codec."""
        return getattr(self._store, "codec", "exact") != "exact"

    def find(
        self, fingerprint: Fingerprint, tokens: Sequence[int], need: CheckpointNeed | None = None
    ) -> PrefixMatch:
        """Find the longest stored prefix that ends at a step. Raises StoreError."""
        if need is not None:
            need = replace(need, step=math.lcm(need.step, self._prefill_step))
        fingerprint = replace(fingerprint, steps=self._steps)
        match = self._store.find(fingerprint, tokens, need)
        block_count = len(match.blocks)
        while block_count * BLOCK_TOKENS % self._prefill_step:
            block_count -= 1
        return replace(match, blocks=match.blocks[:block_count])

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: BlockStream,
        checkpoint: Checkpoint | None = None,
        kept_ends: Collection[int] = (),
    ) -> int:
        """Store all blocks; see `PrefixCache.add`. Raises StoreError."""
        fingerprint = replace(fingerprint, steps=self._steps)
        return self._store.add(fingerprint, tokens, start, blocks, checkpoint, kept_ends)


def best_match(
    prompt: Sequence[int],
    candidates: Iterable[SessionRecord],
    empty_session: Session,
    target: SessionRecord | None = None,
) -> Match:
    """Return the match with the session of which the prompt can reuse most tokens.

    Raises InvalidArgument for a prompt that is no sequence of the model's token ids.

    candidates: the sessions of the prompt's owner; those on disk are skipped, and those with cells
    that a codec rounded, unless the prefix cache rounds them, too. empty_session: has
    the settings that a match must have. target: the session that will hold the prompt; None if any
    unnamed session may.
    """
    vocab_size = empty_session.core.model.spec.vocab_size
    ids = np.asarray(validation.token_ids("prompt", prompt, vocab_size), dtype=np.int32)
    best = Match()
    may_be_rounded = getattr(empty_session.core.prefix_cache, "rounds", False)
    for record in candidates:
        if record.session is None:
            continue
        if record.live.core.state.rounded and not may_be_rounded and record is not target:
            continue
        may_take_over = record is target if target is not None else not record.named
        match = _match_record(ids, record, empty_session, may_take_over)
        if (match.reused_tokens, match.common_tokens) > (best.reused_tokens, best.common_tokens):
            best = replace(match, nearest_text=record.live.tokens)
    return best


def explain(prompt: Sequence[int], match: Match, number: int = 0) -> ReuseReport:
    """Report how much of a prompt a match reuses, and where it differs from the nearest text."""
    differs_at, difference = match.common_tokens, None
    if match.nearest_text is not None and differs_at < len(prompt):
        start = max(0, differs_at - _CONTEXT_TOKENS)
        excerpt = slice(start, differs_at + _CONTEXT_TOKENS)
        texts = tuple(prompt[excerpt]), tuple(match.nearest_text[excerpt])
        difference = TextDifference(start, differs_at, *texts)
    return ReuseReport(number, time.time(), len(prompt), match.to_reuse(prompt), difference)


def _match_record(
    ids: NDArray[np.int32], record: SessionRecord, empty_session: Session, may_take_over: bool
) -> Match:
    """Match a prompt. may_take_over: whether the session itself may hold it, rather than a copy."""
    session, memory = record.live, record.live.core.memory
    # The session's text may be much longer than the prompt.
    common_tokens = common_length(session.tokens.first(len(ids)).array(), ids)
    if common_tokens == 0:
        return Match()
    if reuse_settings(session) != reuse_settings(empty_session):
        return Match(common_tokens=common_tokens, reason="settings")
    # A session from a file, or one that was added, may have been edited without the engine.
    if record.first_edit or is_edited_in_place(memory.cache, memory.serials):
        return Match(common_tokens=common_tokens, reason="edited")
    limit = min(common_tokens, len(ids) - 1)  # at least one token is left to evaluate
    if resumed_tokens := _resumed_tokens(record, limit, may_take_over):
        return Match(record, resumed_tokens, common_tokens, "differs", resumes_session=True)
    reusable_tokens, reason = _reusable_tokens(record, limit)
    reused_tokens = _end_of_reuse(record, reusable_tokens)
    if not reason and reused_tokens < record.end_of_last_step(reusable_tokens):
        reason = "no_checkpoint"
    if not reused_tokens:
        return Match(common_tokens=common_tokens, reason=reason or "below_step")
    return Match(record, reused_tokens, common_tokens, reason or "differs")


def _resumed_tokens(record: SessionRecord, limit: int, may_take_over: bool) -> int:
    """Return how many tokens a prompt keeps that continues the answer at a session's end.

    0 if it does not. limit: how many of the first tokens they share. may_take_over: see
    `_match_record`. A model with states keeps as many as the newest checkpoint has.
    """
    memory = record.live.core.memory
    ends_with_answer = record.sampled_length == len(memory.tokens)
    min_length = record.sampled_length - record.droppable_tokens
    if record.busy or not ends_with_answer or limit < min_length:
        return 0
    if (may_take_over and limit == len(memory.tokens)) or holds_beginning(memory, limit):
        return limit
    checkpoint = usable_checkpoint(memory, limit)
    length = checkpoint.num_tokens if checkpoint else 0
    return length if length >= max(1, min_length) and holds_beginning(memory, length) else 0


def _reusable_tokens(record: SessionRecord, limit: int) -> tuple[int, MissReason]:
    """Return how many of the first `limit` cells depend on their tokens alone, and why not all."""
    session, cache = record.live, record.live.cache
    if any(segment.compressed for segment in cache.segments):
        return 0, "compressed"
    if cache.layout.quantised or cache.far_layout.quantised:
        return 0, "quantised"
    if cache.cells < len(session.tokens):
        return 0, "forgotten"
    window = next((segment.length for segment in cache.segments if not segment.is_anchor), 0)
    anchors = sum(segment.length for segment in cache.segments if segment.is_anchor)
    limit = min(limit, window + anchors)
    # The last step of a prompt is rarely whole; its tokens do not count as sampled ones.
    has_sampled_tokens = record.end_of_last_step(limit) > record.step_aligned_tokens
    reason: MissReason = "settings" if record.has_other_steps else "sampled"
    return min(limit, record.step_aligned_tokens), reason if has_sampled_tokens else ""


def _end_of_reuse(record: SessionRecord, max_tokens: int) -> int:
    """Return the end of the last whole prefill step, at which there must be a checkpoint.

    Only models with local layers or states need one.
    """
    memory = record.live.core.memory
    while memory.overwrites and max_tokens:
        checkpoint = usable_checkpoint(memory, max_tokens)
        if checkpoint is None:
            return 0
        if record.end_of_last_step(checkpoint.num_tokens) == checkpoint.num_tokens:
            return checkpoint.num_tokens
        max_tokens = checkpoint.num_tokens - 1
    return record.end_of_last_step(max_tokens)


def reuse_settings(session: Session) -> tuple[object, ...]:
    """Return the settings that two sessions must share to reuse cells of each other."""
    keep = session.keep if session.keep >= 0 else None  # -1: the whole first prompt
    return (session.core.memory.policy, session.bits, session.prefill_step, keep)
