"""Sampling the next token from logits: penalties, constraint, temperature and filters.

In numpy, which computes in the calling thread: for a vector, waking torch's threads takes longer
than the work, and much longer where other programs keep their cores busy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.history import History
from kvkeep.session.sampling import Sampling

_LARGEST_LOGIT = float(np.finfo(np.float32).max)
_Floats: TypeAlias = NDArray[np.float32]
_Ids: TypeAlias = NDArray[np.int64]
_NO_IDS: _Ids = np.array([], dtype=np.int64)


class Sampler:
    """Samples tokens. Its only state is a random generator, replaced when the seed changes."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._generator: np.random.Generator | None = None

    def state(self) -> dict[str, Any]:
        """Return the seed and the generator's state as JSON values; {} before the first draw."""
        if self._generator is None:
            return {}
        return {"seed": self._seed, "generator": self._generator.bit_generator.state}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Sampler":
        """Return the sampler with a state. Raises InvalidArgument for an invalid one."""
        sampler = cls()
        if not state:
            return sampler
        try:
            sampler._seed = validation.optional_integer("seed", state["seed"], 0)
            sampler._generator = np.random.Generator(np.random.PCG64(0))
            sampler._generator.bit_generator.state = state["generator"]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"a sampler must have a seed and a state of NumPy's PCG64; found {error!r}"
            ) from error
        return sampler

    def sample(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        sampling: Sampling,
        suppressed: NDArray[np.int64] = _NO_IDS,
    ) -> int:
        """Return a token id. logits: `[vocab]` float32, finite. tokens: all so far.

        suppressed: ids `[n]` of tokens that are not sampled, unless a constraint allows no others.
        """
        scores = _process_logits(logits, tokens, sampling, suppressed)
        if sampling.greedy:
            return int(scores.argmax())
        ids, weights = _candidates(scores, sampling)
        cumulative = _cumulative(weights)
        threshold = self._draw_uniform(sampling.seed) * cumulative[-1]
        index = int(cumulative.searchsorted(threshold, side="right"))
        return int(ids[min(index, len(ids) - 1)])

    def _draw_uniform(self, seed: int | None) -> float:
        if self._generator is None or seed != self._seed:
            self._seed, self._generator = seed, np.random.Generator(np.random.PCG64(seed))
        return float(self._generator.random())


def distribution(
    logits: Tensor, tokens: Sequence[int], sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Return the ids `[n]` that a token is drawn from, and their weights, which need not sum to 1.

    logits: `[vocab]` float32, finite. tokens: all so far, for the penalties.
    """
    scores = _process_logits(logits, tokens, sampling, _NO_IDS)
    if sampling.greedy:
        ids, weights = np.array([scores.argmax()]), np.ones(1, dtype=np.float32)
    else:
        ids, weights = _candidates(scores, sampling)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def _candidates(scores: _Floats, sampling: Sampling) -> tuple[_Ids, _Floats]:
    """Return what `distribution` does, for a temperature above 0. scores: `[vocab]`."""
    # At most float32's largest: with a higher temperature, forbidden tokens would become NaN.
    temperature = np.float32(min(sampling.temperature, _LARGEST_LOGIT))
    with np.errstate(over="ignore"):  # to minus infinity, at a low temperature
        scores = (scores - scores.max()) / temperature
    # Not in numpy: the vector is one row, which torch computes in one thread, and faster.
    probabilities = torch.from_numpy(scores).softmax(-1).numpy()
    return _apply_top_p_min_p(probabilities, _top_k_ids(scores, sampling.top_k), sampling)


def _top_k_ids(scores: _Floats, k: int) -> _Ids | None:
    """Return the ids of the `k` largest scores and of ties with the last of them; None for all.

    Without those that are forbidden, whose score is minus infinity.
    """
    if not 0 < k < len(scores):
        return None
    # Scores, since the probabilities of different scores may both be 0.
    largest, ids = torch.from_numpy(scores).topk(k + 1)
    last, next_one = largest[-2:].tolist()
    if next_one < last:
        return ids[:-1].numpy()
    if last == -np.inf:  # fewer are allowed, and all others are ties
        return np.flatnonzero(scores > last)
    return np.flatnonzero(scores >= last)


def _apply_top_p_min_p(
    probabilities: _Floats, ids: _Ids | None, sampling: Sampling
) -> tuple[_Ids, _Floats]:
    """Apply top_p and min_p to some ids (None for all); return the remaining ids and weights."""
    if ids is None and sampling.top_p == 1 and sampling.min_p == 0:
        return np.arange(len(probabilities)), probabilities
    total_probability = 1.0
    if ids is None:
        # Tokens below (1 - top_p) / vocab have less than 1 - top_p together, so none of them is in
        # the nucleus, and only the rest, usually a handful, is sorted.
        lowest_in_nucleus = (1 - sampling.top_p) / len(probabilities)
        lowest = max(lowest_in_nucleus, float(sampling.min_p * probabilities.max()))
        ids = np.flatnonzero(probabilities >= lowest)
    else:
        total_probability = float(probabilities[ids].sum(dtype=np.float64))
    weights, ids = _sorted_by_weight(probabilities[ids], ids)
    remaining = weights >= sampling.min_p * weights[0]
    if sampling.top_p < 1:
        before = _cumulative(weights) - weights
        remaining &= before < sampling.top_p * total_probability
    remaining[0] = True
    return ids[remaining], weights[remaining]


def _cumulative(weights: _Floats) -> NDArray[np.float64]:
    # Not in numpy: torch's sums of one row take a fifth of the time, in one thread, too.
    sums: NDArray[np.float64] = torch.from_numpy(weights).cumsum(-1, dtype=torch.float64).numpy()
    return sums


def _sorted_by_weight(weights: _Floats, ids: _Ids) -> tuple[_Floats, _Ids]:
    """Return weights `[n]`, the largest first, and their ids; equal ones in their order.

    Sorted as integers, which numpy does with vector instructions: a stable sort of floats takes
    several times as long. Non-negative floats sort as their bits do.
    """
    bits = weights.view(np.uint32).astype(np.uint64)
    keys = (np.uint64(0xFFFFFFFF) - bits) << np.uint64(32) | np.arange(len(bits), dtype=np.uint64)
    keys.sort()
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return weights[order], ids[order]


def _process_logits(
    logits: Tensor, tokens: Sequence[int], sampling: Sampling, suppressed: _Ids
) -> _Floats:
    """Return the scores to sample from, `[vocab]`. logits: `[vocab]` float32, finite."""
    sampling.require_vocabulary(len(logits))
    scores = _array(logits)
    if sampling.logit_bias:
        bias_ids, biases = sampling.biases
        scores = _replace_logits(scores, bias_ids, scores[bias_ids] + biases)
    window = sampling.repetition_window
    has_subtracted_penalty = sampling.presence_penalty or sampling.frequency_penalty
    if window and (sampling.repetition_penalty != 1 or has_subtracted_penalty):
        recent = tokens.last(window) if isinstance(tokens, History) else tokens[-window:]
        scores = _penalise_repeats(scores, np.asarray(recent, dtype=np.int64), sampling)
    if sampling.constraint is not None:
        scores = _array(sampling.constraint.masked(torch.from_numpy(scores)))
    return _suppress(scores, suppressed) if len(suppressed) else scores


def _suppress(scores: _Floats, ids: _Ids) -> _Floats:
    """Return scores with minus infinity for tokens, unless nothing else is allowed."""
    others = scores.copy()
    others[ids] = -np.inf
    return scores if others.max() == -np.inf else others


def _array(logits: Tensor) -> _Floats:
    # A constraint may return another dtype, or a tensor with a gradient.
    array: _Floats = logits.detach().cpu().float().numpy()
    return array


def _penalise_repeats(logits: _Floats, recent: _Ids, sampling: Sampling) -> _Floats:
    """Return logits with those of the recent tokens lowered."""
    if not len(recent):
        return logits
    ids, repeats = np.unique(recent, return_counts=True)
    scores, penalty = logits[ids].astype(np.float64), sampling.repetition_penalty
    with np.errstate(over="ignore"):
        if penalty != 1:
            scores = _clamped(np.where(scores > 0, scores / penalty, scores * penalty))
        scores = scores - sampling.presence_penalty - sampling.frequency_penalty * repeats
    return _replace_logits(logits, ids, scores)


def _replace_logits(logits: _Floats, ids: _Ids, scores: NDArray[np.float64]) -> _Floats:
    changed = logits.copy()
    changed[ids] = _clamped(scores)
    return changed


def _clamped(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    # To finite float32: infinity minus infinity would be NaN.
    return scores.clip(-_LARGEST_LOGIT, _LARGEST_LOGIT)
