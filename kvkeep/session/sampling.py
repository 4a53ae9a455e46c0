"""Sampling the next token from logits: penalties, constraint, temperature and filters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.history import History

_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # dividing by less overflows float32
_LARGEST_LOGIT = float(np.finfo(np.float32).max)
_Floats: TypeAlias = NDArray[np.float32]
_Ids: TypeAlias = NDArray[np.int64]


class Constraint(Protocol):
    """A mask over the tokens that may come next, such as those that a grammar allows.

    `masked` is called before each token is sampled, and `accept` after the session has appended it.
    A constraint has a state of its own for one generation; sessions do not save it.

    It may have a bool `complete`: whether its text is complete and no further token may come.
    Generation then ends as at an end token; without it, an end token ends generation.
    """

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits `[vocab]` float32 with -inf for forbidden tokens, but not for all.

        The argument is not modified.
        """

    def accept(self, token: int) -> None:
        """Follow a sampled token. It must not raise: the session has appended the token."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The default is greedy.

    They apply in the order: bias, penalties, constraint, temperature, top_k, top_p, min_p, as in
    transformers.

    temperature: divides the logits; 0, and anything that float32 cannot divide by (below 1.2e-38),
        takes the most likely token.
    top_k: only the k most likely tokens, and those as likely as the last of them; 0 for all.
    top_p: the smallest set with at least this probability (nucleus, arXiv:1904.09751).
    min_p: only tokens with at least this fraction of the largest probability (arXiv:2407.01082).
    repetition_penalty: divides positive and multiplies negative logits of tokens that occur in
        the last `repetition_window` (CTRL, arXiv:1909.05858); 1 is off.
    presence_penalty: subtracted from the logits of tokens that occur in that window.
    frequency_penalty: subtracted once for each occurrence in that window.
    seed: the same seed gives the same tokens; None takes one from the system.
    stop: `Session.stream` ends before the one of these strings that is complete first; of several
        with the same end, before the longest.
    logit_bias: pairs of a token id and a number that is added to its logit; those of one token are
        added up.
    constraint: masks the tokens that are not allowed next, such as a grammar. It follows the
        sampled tokens, so that it belongs to one generation of one session.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if setting.type is float:
                self._set(name, validation.finite_number(name, value))
            elif setting.type is int:
                self._set(name, validation.integer(name, value, 0))
        self._set("seed", validation.optional_integer("seed", self.seed, 0))
        self._set("stop", _checked_stop_strings(self.stop))
        self._set("logit_bias", _checked_biases(self.logit_bias))
        penalty = self.repetition_penalty
        _require(self.temperature >= 0, "temperature", "0 or more", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0, at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "0 to 1", self.min_p)
        _require(penalty > 0, "repetition_penalty", "above 0", penalty)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature < _MIN_TEMPERATURE

    @property
    def complete(self) -> bool:
        """Whether the constraint allows no further token, so that generation ends."""
        return bool(getattr(self.constraint, "complete", False))

    @cached_property
    def biases(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The token ids of `logit_bias` and what is added to their logits, `[n]` each."""
        ids = np.array([token for token, _ in self.logit_bias], dtype=np.int64)
        return ids, np.array([bias for _, bias in self.logit_bias], dtype=np.float64)

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidArgument if a token of `logit_bias` is none of the vocabulary."""
        if not self.logit_bias:
            return
        largest_id = int(self.biases[0].max())
        if largest_id >= vocab_size:
            raise InvalidArgument(
                f"tokens of logit_bias must be 0 to {vocab_size - 1}; found {largest_id}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def require_own_constraints(samplings: Sequence[Sampling], in_use: Iterable[Sampling] = ()) -> None:
    """Raise InvalidArgument if two samplings, or one and a used one, share a constraint."""
    owners = {id(s.constraint): "an object in use" for s in in_use if s.constraint is not None}
    for index, sampling in enumerate(samplings):
        if sampling.constraint is None:
            continue
        if owner := owners.get(id(sampling.constraint)):
            raise InvalidArgument(
                f"sampling {index} shares its constraint object with {owner}: a constraint follows "
                "one session's tokens; create one for each Sampling"
            )
        owners[id(sampling.constraint)] = f"sampling {index}"


def _checked_biases(value: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, bias) for token, bias in cast(Iterable[tuple[object, object]], value)]
    except (TypeError, ValueError):
        _require(False, "logit_bias", "pairs of a token id and a number", value)
    sums = dict[int, float]()
    for token, bias in pairs:
        token_id = validation.integer("a token of logit_bias", token, 0)
        sums[token_id] = sums.get(token_id, 0.0) + validation.finite_number("logit_bias", bias)
    # Checked again: a sum may overflow.
    return tuple((token, validation.finite_number("logit_bias", s)) for token, s in sums.items())


def _checked_stop_strings(value: object) -> tuple[str, ...]:
    is_sequence = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    _require(is_sequence, "stop", "a tuple of strings, none empty", value)
    strings = tuple(validation.text("stop", item) for item in cast(Iterable[object], value))
    _require(all(strings), "stop", "a tuple of strings, none empty", value)
    return strings


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise InvalidArgument(f"{name} must be {expected}; found {value!r}")


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

    def sample(self, logits: Tensor, tokens: Sequence[int], sampling: Sampling) -> int:
        """Return a token id. logits: `[vocab]` float32, finite. tokens: all so far."""
        if sampling.greedy:
            return int(_process_logits(logits, tokens, sampling).argmax())
        ids, weights = _candidates(logits, tokens, sampling)
        cumulative = weights.cumsum(dtype=np.float64)
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
    if sampling.greedy:
        largest = int(_process_logits(logits, tokens, sampling).argmax())
        ids, weights = np.array([largest], dtype=np.int64), np.ones(1, dtype=np.float32)
    else:
        ids, weights = _candidates(logits, tokens, sampling)
    return torch.from_numpy(ids), torch.from_numpy(weights)


# In numpy, which computes in the calling thread: for a vector, waking torch's threads takes longer
# than the work, and much longer where other programs keep their cores busy.


def _candidates(logits: Tensor, tokens: Sequence[int], sampling: Sampling) -> tuple[_Ids, _Floats]:
    """Return what `distribution` does, for a temperature above 0."""
    scores = _process_logits(logits, tokens, sampling)
    # At most float32's largest: with a higher temperature, forbidden tokens would become NaN.
    temperature = np.float32(min(sampling.temperature, _LARGEST_LOGIT))
    with np.errstate(over="ignore"):  # to minus infinity, at a low temperature
        scores = (scores - scores.max()) / temperature
    # Not in numpy: the vector is one row, which torch computes in one thread, and faster.
    probabilities = torch.from_numpy(scores).softmax(-1).numpy()
    return _apply_top_p_min_p(probabilities, _top_k_ids(scores, sampling.top_k), sampling)


def _top_k_ids(scores: _Floats, k: int) -> _Ids | None:
    """Return the ids of the `k` largest scores and of ties with the last of them; None for all.

    Without those that a constraint forbids, whose score is minus infinity.
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
        before = weights.cumsum(dtype=np.float64) - weights
        remaining &= before < sampling.top_p * total_probability
    remaining[0] = True
    return ids[remaining], weights[remaining]


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


def _process_logits(logits: Tensor, tokens: Sequence[int], sampling: Sampling) -> _Floats:
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
    return scores


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
