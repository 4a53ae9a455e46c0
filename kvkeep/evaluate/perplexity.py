"""Perplexity of a text in a bounded session, step by step."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.session import Session

RECENT_TOKENS = 512  # of `PerplexityPoint.recent`


@dataclass(frozen=True)
class PerplexityPoint:
    """A measurement after a prefill step."""

    tokens: int  # evaluated so far
    scored: int  # how many of these are scored
    perplexity: float  # of all scored tokens; NaN before the first
    recent: float  # perplexity of the last `RECENT_TOKENS` scored tokens
    kv_cells: int  # held after the step
    kv_bytes: int
    rss_bytes: int  # of the process


def perplexity_points(
    session: Session,
    ids: Sequence[int],
    first: int = 1,
    token_by_token: bool = False,
    *,
    one_by_one: bool | None = None,
) -> Iterator[PerplexityPoint]:
    """Yield the perplexity of a text after each prefill step of a new session.

    Each token is scored given the cells that the session holds then. Errors are raised at the call.

    Args:
        first: the index of the first token to score; those before are context.
        token_by_token: evaluate tokens one by one by decode steps, as `Session.score` does with it.
        one_by_one: deprecated: use `token_by_token`.

    Raises:
        InvalidArgument: `first` is not an index above 0 of `ids`, or the session is not new.
        ContextFull: the policy cannot hold the whole text.
    """
    if one_by_one is not None:
        message = "perplexity_points(one_by_one=) is deprecated: use token_by_token"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        token_by_token = one_by_one
    if session.cache.time:
        raise InvalidArgument(
            f"perplexity needs a new session; this one has evaluated {session.cache.time} tokens"
        )
    if not 1 <= first < len(ids):
        raise InvalidArgument(
            f"the first token to score must be 1 to {len(ids) - 1} in a text of {len(ids)} tokens "
            f"(token 0 has no prediction); found {first}"
        )
    room = session.room
    if room is not None and len(ids) > room:
        raise ContextFull(
            f'policy "{session.policy}" holds at most {room} tokens, and the text has {len(ids)}: '
            'score fewer tokens, or use policy "sliding"'
        )
    return _measure_steps(session, ids, first, token_by_token)


def _measure_steps(
    session: Session, ids: Sequence[int], first: int, token_by_token: bool
) -> Iterator[PerplexityPoint]:
    process, log_likelihood, scored_count = psutil.Process(), 0.0, 0
    recent_scores = torch.empty(0, dtype=torch.float64, device="cpu")  # at most RECENT_TOKENS
    for start in range(0, len(ids), session.prefill_step):
        chunk = ids[start : start + session.prefill_step]
        scores = session.score(chunk, token_by_token=token_by_token)[max(0, first - start) :]
        scored_count += len(scores)
        log_likelihood += float(scores.sum())
        recent_scores = torch.cat((recent_scores, scores))[-RECENT_TOKENS:]
        yield PerplexityPoint(
            tokens=start + len(chunk),
            scored=scored_count,
            perplexity=_perplexity(log_likelihood, scored_count),
            recent=_perplexity(float(recent_scores.sum()), len(recent_scores)),
            kv_cells=session.cache.cells,
            kv_bytes=session.cache.nbytes,
            rss_bytes=process.memory_info().rss,
        )


def _perplexity(log_likelihood: float, token_count: int) -> float:
    if not token_count:
        return math.nan
    try:
        return math.exp(-log_likelihood / token_count)
    except OverflowError:
        return math.inf
