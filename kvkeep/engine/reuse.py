"""What of a prompt an engine has in its memory already, and why not more of it.

A session that holds the first tokens of a prompt, each in a cell of its own as its tokens alone
give it, is taken from at the end of a step. So an answer is the same, to the bit, whether a part of
its prompt was reused or not. One exception is meant: a prompt that goes on behind the last token
that was sampled in a session, as the next turn of a chat does, goes on with all of its cells, those
of sampled tokens too. They are what the model read when it wrote them; evaluated as a prompt they
would differ by rounding. Where a session stands behind a token of a prompt nothing is exempt: the
last step of that prompt ended where no step of a longer one does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvkeep.engine.record import SessionRecord

# Why a part of a prompt was not reused that somebody's text begins with:
# "cold": no text begins like it. "differs": the nearest text goes on otherwise. "below_step": what
# they have in common ends within a step. "forgotten", "compressed", "quantised", "edited": the
# session's cells are no longer those that its tokens give. "written": its tokens were written, not
# read. "settings": its policy, step or bits are others.
Miss = Literal[
    "",
    "cold",
    "differs",
    "below_step",
    "forgotten",
    "compressed",
    "quantised",
    "edited",
    "written",
    "settings",
]


@dataclass(frozen=True)
class Match:
    """The best of what is there for a prompt.

    record: whose first `tokens` are reused; None for nobody's. whole: whether it goes on where that
    session stands, behind a sampled token. common: how many first tokens the nearest text shares.
    reason: see `Miss`.
    """

    record: SessionRecord | None = None
    tokens: int = 0
    whole: bool = False
    common: int = 0
    reason: Miss = "cold"
    nearest: Sequence[int] | None = None


def best_match(
    prompt: Sequence[int],
    candidates: Iterable[SessionRecord],
    like: SessionRecord,
    into: SessionRecord | None = None,
) -> Match:
    """The session that the prompt takes most from.

    candidates: in memory, of the owner who asks. like: one with the settings that are wanted.
    into: the session that takes the prompt; None for any without a name, which goes on itself where
    it is the best match.
    """
    ids = np.asarray(prompt, dtype=np.int32)
    best = Match()
    for kept in candidates:
        if kept is like or kept.session is None:
            continue
        itself = kept is into if into is not None else not kept.named
        found = _match(ids, kept, like, itself)
        if (found.tokens, found.common) > (best.tokens, best.common):
            best = replace(found, nearest=kept.live.tokens)
    return best


def _match(ids: NDArray[np.int32], kept: SessionRecord, like: SessionRecord, itself: bool) -> Match:
    """itself: whether the session would go on, and not a copy of it."""
    session = kept.live
    # No more of it than the prompt is long: a session may have read for days.
    held = np.frombuffer(session.tokens.first(len(ids)).array(), dtype=np.int32)
    common = common_length(ids, held)
    if common == 0:
        return Match()
    if _settings(kept) != _settings(like):
        return Match(common=common, reason="settings")
    # One token at least is evaluated, for its logits.
    stands = kept.ends_sampled and not kept.busy and not kept.changed
    if stands and common == len(session.tokens) < len(ids) and (itself or session.holds_all):
        return Match(kept, common, True, common, "differs")
    most, reason = _exact(kept, min(common, len(ids) - 1))
    tokens = kept.whole_steps(most)
    if not tokens:
        return Match(common=common, reason=reason or "below_step")
    return Match(kept, tokens, False, common, reason or "differs")


def _exact(kept: SessionRecord, most: int) -> tuple[int, Miss]:
    """How many of the first `most` cells are what any such text has, and what ended them."""
    cache, session = kept.live.cache, kept.live
    if kept.changed:
        return 0, "edited"
    if any(segment.compressed for segment in cache.segments):
        return 0, "compressed"
    if cache.layout.quantised or cache.far_layout.quantised:
        return 0, "quantised"
    if cache.cells < len(session.tokens) or cache.local is not None or cache.recurrent:
        return 0, "forgotten"
    window = next((segment.length for segment in cache.segments if not segment.anchor), 0)
    most = min(most, window + sum(each.length for each in cache.segments if each.anchor))
    step = kept.live.prefill_step  # the last one of a prompt is rarely whole
    return min(most, kept.evaluated), "written" if most >= kept.evaluated + step else ""


def common_length(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many first numbers are the same."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _settings(kept: SessionRecord) -> tuple[object, ...]:
    session = kept.live
    keep = session.keep if session.keep >= 0 else None
    return (session._memory.policy, session.bits, session.prefill_step, keep)
