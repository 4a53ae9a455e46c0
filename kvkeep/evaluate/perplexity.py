"""Perplexity of a text, token by token, under a session's own memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.session import Session

RECENT = 512  # tokens that `recent` looks back on


@dataclass(frozen=True)
class PerplexityPoint:
    """Where a measurement stands after a step.

    tokens: evaluated so far. scored: of these, the ones that count. perplexity: of all scored
    tokens, exp of the mean negative log-likelihood; recent: of the last `RECENT` of them; both
    NaN before the first. kv_cells, kv_bytes: held after the step. rss_bytes: of the process.
    """

    tokens: int
    scored: int
    perplexity: float
    recent: float
    kv_cells: int
    kv_bytes: int
    rss_bytes: int


@dataclass(frozen=True)
class Perplexity:
    """perplexity: of the tokens `first` to `end - 1` of the text. trace: one point a step."""

    perplexity: float
    first: int
    end: int
    trace: tuple[PerplexityPoint, ...]


def measure_perplexity(
    session: Session,
    ids: Sequence[int],
    first: int = 1,
    progress: Callable[[int], None] | None = None,
    written: bool = False,
) -> Perplexity:
    """How well a new session foresees a text, each token from what it then remembers.

    Args:
        ids: the text's tokens. first: tokens before this index are read but not scored.
        progress: called after each step with the number of tokens in it.
        written: each token is evaluated by itself, as what a model writes; see `Session.score`.

    Raises:
        InvalidArgument: `first` is not an index above 0 of `ids`, or the session is not new.
        ContextFull: the policy cannot take the whole text.
    """
    points, done = [], 0
    for point in perplexity_points(session, ids, first, written):
        points.append(point)
        if progress:
            progress(point.tokens - done)
        done = point.tokens
    return Perplexity(points[-1].perplexity, first, len(ids), tuple(points))


def perplexity_points(
    session: Session, ids: Sequence[int], first: int = 1, written: bool = False
) -> Iterator[PerplexityPoint]:
    """As `measure_perplexity`, point by point, so that one can stop in between.

    Arguments are checked at the call, before the first point is asked for.
    """
    if session.cache.time:
        raise InvalidArgument(
            f"perplexity is measured in a new session; this one has read {session.cache.time} "
            "tokens"
        )
    if not 1 <= first < len(ids):
        raise InvalidArgument(
            f"the first token to score must be 1 to {len(ids) - 1} in a text of {len(ids)} tokens "
            f"(nothing foretells token 0); found {first}"
        )
    room = session.room
    if room is not None and len(ids) > room:
        raise ContextFull(
            f'policy "{session.policy}" holds at most {room} tokens and the text has {len(ids)}; '
            'measure fewer of them, or take policy "sliding"'
        )
    return _points(session, ids, first, written)


def _points(
    session: Session, ids: Sequence[int], first: int, written: bool
) -> Iterator[PerplexityPoint]:
    process, total, scored = psutil.Process(), 0.0, 0
    latest = torch.empty(0, dtype=torch.float64, device="cpu")  # scores, at most RECENT
    for begin in range(0, len(ids), session.prefill_step):
        chunk = ids[begin : begin + session.prefill_step]
        scores = session.score(chunk, written=written)[max(0, first - begin) :]
        scored += len(scores)
        total += float(scores.sum())
        latest = torch.cat((latest, scores))[-RECENT:]
        yield PerplexityPoint(
            tokens=begin + len(chunk),
            scored=scored,
            perplexity=_perplexity(total, scored),
            recent=_perplexity(float(latest.sum()), len(latest)),
            kv_cells=session.cache.cells,
            kv_bytes=session.cache.nbytes,
            rss_bytes=process.memory_info().rss,
        )


def _perplexity(total: float, count: int) -> float:
    if not count:
        return math.nan
    try:
        return math.exp(-total / count)
    except OverflowError:
        return math.inf
