"""Reuse in place: a prompt that differs from a session's text is an edited copy of that session.

`kvkeep.engine.reuse` reuses the beginning of a session, which is exact. Here the cells behind a
difference are reused too, although they were computed after another text: for requests that ask for
it, and only where it saves enough. Such a session is marked as edited from its start, so that no
exact reuse takes cells from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.reuse import (
    Match,
    ReuseReport,
    Seam,
    best_match,
    explain,
    reuse_settings,
)
from kvkeep.engine.usage import Reuse
from kvkeep.errors import KvkeepError
from kvkeep.session.aligning import plan_for
from kvkeep.session.alignment import AlignmentOptions, AlignmentPlan
from kvkeep.session.session import Session
from kvkeep.session.token_diff import piece_hashes

ALIGNED = "align"  # `SessionRecord.first_edit` of an aligned session
_MAX_COMPARED = 64  # sessions, the last used first
_MAX_PLANNED = 2  # of these, the most similar ones
_PIECE_LENGTH = 16  # tokens
_NO_PIECES = np.zeros(0, np.uint64)
_SAMPLING = np.uint64(8)  # one of so many pieces is compared


@dataclass(frozen=True)
class InPlaceMatch:
    """The session whose edited copy is the start of a prompt, and how it is edited."""

    record: SessionRecord
    plan: AlignmentPlan

    def continues_session(self, target: SessionRecord | None) -> bool:
        """Whether the session itself can take the prompt: it is an aligned one, and not edited.

        target: the session that will hold the prompt; None if any unnamed session may.
        """
        record, plan = self.record, self.plan
        may_take = not record.named if target is None else record is target
        is_free = may_take and not record.busy and record.first_edit == ALIGNED
        return is_free and not plan.seams and plan.tail.start == plan.tail.end

    def to_reuse(self, match: Match) -> Reuse:
        """Return the reuse as it is reported. match: of exact reuse, which tells why not more."""
        plan, is_whole = self.plan, not self.plan.seams and len(self.plan.tail.ids) == 1
        return Reuse(
            tokens=plan.kept + plan.moved,
            source="session",
            reason="" if is_whole else match.reason,
            differs_at=None if is_whole else plan.kept,
            session=self.record.name,
            mode="in_place",
            seams=plan.seams,
            moved=plan.moved,
            reread=sum(edit.reread for edit in plan.edits),
        )

    def seams(self) -> tuple[Seam, ...]:
        """Return what is removed and inserted at each seam."""
        tokens, growth, seams = self.record.live.tokens, 0, []
        for edit in self.plan.edits:
            removed = tokens[edit.start : edit.end - edit.reread]
            inserted = edit.ids[: len(edit.ids) - edit.reread]
            at = edit.start + growth
            seams.append(Seam(at, tuple(removed), inserted, edit.reread))
            growth += edit.growth
        return tuple(seams)


def match_prompt(
    prompt: Sequence[int],
    candidates: Iterable[SessionRecord],
    empty_session: Session,
    options: AlignmentOptions,
    target: SessionRecord | None = None,
) -> tuple[Match, InPlaceMatch | None, ReuseReport]:
    """Return the exact match of a prompt, the one in place if it is to be used, and a report.

    candidates, empty_session, target: see `best_match`.
    """
    records = list(candidates)
    match = best_match(prompt, records, empty_session, target)
    report = explain(prompt, match)
    if options.mode == "exact":
        return match, None, report
    in_place, refusal = _best_in_place_match(prompt, records, empty_session, options, match)
    if in_place is None:
        reuse = replace(report.reuse, not_in_place=refusal)
        return match, None, replace(report, reuse=reuse)
    reuse = in_place.to_reuse(match)
    return match, in_place, replace(report, reuse=reuse, seams=in_place.seams())


def _best_in_place_match(
    prompt: Sequence[int],
    candidates: Iterable[SessionRecord],
    empty_session: Session,
    options: AlignmentOptions,
    exact: Match,
) -> tuple[InPlaceMatch | None, str]:
    """Return the match that evaluates the fewest tokens; without one, why there is none.

    exact: of exact reuse; a match saves at least `options.min_saved` tokens more.
    """
    needed, exact_cost = max(1, options.min_saved), len(prompt) - exact.reused_tokens
    if exact_cost < needed:
        return None, f"exact reuse leaves {exact_cost} tokens; {needed} or more must be saved"
    best, best_cost, refusal = None, exact_cost, "no session has a similar text"
    for record in _most_similar(prompt, candidates, empty_session):
        try:
            plan = plan_for(record.live.core.memory, prompt, options)
        except KvkeepError as error:
            refusal = str(error)
            continue
        cost = plan.evaluated + plan.refilled
        if cost < best_cost:
            best, best_cost = InPlaceMatch(record, plan), cost
    saved = exact_cost - best_cost
    if best is None or saved < needed:
        refusal_of_best = f"it would save {saved} tokens; {needed} or more must be saved"
        return None, refusal if best is None else refusal_of_best
    return best, ""


def _most_similar(
    prompt: Sequence[int], candidates: Iterable[SessionRecord], empty_session: Session
) -> list[SessionRecord]:
    """Return the sessions with the most tokens in common with the prompt, in bounded time."""
    usable = [record for record in candidates if record.session is not None]
    settings = reuse_settings(empty_session)
    usable = [record for record in usable if reuse_settings(record.live) == settings]
    usable.sort(key=lambda record: record.last_used, reverse=True)
    pieces, similar = _pieces(np.asarray(prompt, dtype=np.int64)), []
    for record in usable[:_MAX_COMPARED]:
        tokens = np.frombuffer(record.live.tokens.array(), dtype=np.int32)
        shared = int(np.isin(pieces, _pieces(tokens)).sum())
        if shared:
            similar.append((shared, not record.first_edit, record))
    similar.sort(key=lambda entry: entry[:2], reverse=True)
    return [record for *_, record in similar[:_MAX_PLANNED]]


def _pieces(ids: NDArray[np.signedinteger]) -> NDArray[np.uint64]:
    """Return the hashes of some pieces of a text: of the same ones wherever they occur."""
    hashes = piece_hashes(ids, _PIECE_LENGTH) if len(ids) >= _PIECE_LENGTH else _NO_PIECES
    sampled: NDArray[np.uint64] = hashes[(hashes >> np.uint64(32)) % _SAMPLING == 0]
    return sampled
