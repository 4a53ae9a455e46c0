"""Sampling the next token from logits: penalties, constraint, temperature and filters."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument

_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # dividing by less overflows float32
_LARGEST_LOGIT = float(torch.finfo(torch.float32).max)


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

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidArgument if a token of `logit_bias` is none of the vocabulary."""
        largest_id = max((token for token, _ in self.logit_bias), default=-1)
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
            return _argmax(_process_logits(logits.cpu(), tokens, sampling))
        ids, weights = distribution(logits, tokens, sampling)
        cumulative = weights.double().cumsum(-1)
        threshold = self._draw_uniform(sampling.seed) * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, threshold, right=True))
        return int(ids[min(index, ids.shape[0] - 1)])

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
    scores = _process_logits(logits.cpu(), tokens, sampling)  # float64 is not on every device
    if sampling.greedy:
        ids = torch.tensor([_argmax(scores)], dtype=torch.int64, device="cpu")
        return ids, torch.ones(1, dtype=torch.float32, device="cpu")
    scores = (scores - scores.max()) / sampling.temperature
    return _apply_top_p_min_p(scores.softmax(-1), _top_k_ids(scores, sampling.top_k), sampling)


def _argmax(scores: Tensor) -> int:
    # In numpy: for a vector, waking torch's threads takes longer than the search.
    return int(scores.numpy().argmax())


def _top_k_ids(scores: Tensor, k: int) -> Tensor | None:
    """Return the ids of the `k` largest scores and of ties with the last of them; None for all."""
    if not 0 < k < scores.shape[0]:
        return None
    # Scores, since the probabilities of different scores may both be 0.
    largest, ids = scores.topk(k + 1)
    if largest[-1] < largest[-2]:
        return ids[:-1]
    if largest[-2] == -torch.inf:  # a constraint allows fewer; the others would all be ties
        return (scores > -torch.inf).nonzero().squeeze(-1)
    return (scores >= largest[-2]).nonzero().squeeze(-1)


def _apply_top_p_min_p(
    probabilities: Tensor, ids: Tensor | None, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Apply top_p and min_p to some ids (None for all); return the remaining ids and weights."""
    if ids is None and sampling.top_p == 1 and sampling.min_p == 0:
        all_ids = torch.arange(probabilities.shape[0], dtype=torch.int64, device="cpu")
        return all_ids, probabilities
    total_probability = 1.0
    if ids is None:
        # Tokens below (1 - top_p) / vocab have less than 1 - top_p together, so none of them is in
        # the nucleus, and only the rest, usually a handful, is sorted.
        lowest_in_nucleus = (1 - sampling.top_p) / probabilities.shape[0]
        lowest = max(lowest_in_nucleus, float(sampling.min_p * probabilities.max()))
        ids = (probabilities >= lowest).nonzero().squeeze(-1)
    else:
        total_probability = float(probabilities[ids].double().sum())
    weights, ids = _sorted_by_weight(probabilities[ids], ids)
    remaining = weights >= sampling.min_p * weights[0]
    if sampling.top_p < 1:
        remaining &= weights.double().cumsum(-1) - weights < sampling.top_p * total_probability
    remaining[0] = True
    return ids[remaining], weights[remaining]


def _sorted_by_weight(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights `[n]` float32, the largest first, and their ids; equal ones in their order.

    In numpy, which sorts integers with vector instructions: at 150,000 weights, a stable sort of
    torch takes ten times as long. Of floats that are not negative, the order is that of their bits.
    """
    bits = weights.numpy().view(np.uint32).astype(np.uint64)
    keys = np.sort(
        (np.uint64(0xFFFFFFFF) - bits) << np.uint64(32) | np.arange(len(bits), dtype=np.uint64)
    )
    order = torch.from_numpy((keys & np.uint64(0xFFFFFFFF)).astype(np.int64))
    return weights[order], ids[order]


def _process_logits(logits: Tensor, tokens: Sequence[int], sampling: Sampling) -> Tensor:
    """Return the scores to sample from. logits: `[vocab]` float32, finite, on the CPU."""
    sampling.require_vocabulary(logits.shape[0])
    scores = _apply_bias(logits, sampling.logit_bias) if sampling.logit_bias else logits
    window = sampling.repetition_window
    has_subtracted_penalty = sampling.presence_penalty or sampling.frequency_penalty
    if window and (sampling.repetition_penalty != 1 or has_subtracted_penalty):
        scores = _penalise_repeats(scores, Counter(tokens[-window:]), sampling)
    return scores if sampling.constraint is None else sampling.constraint.masked(scores)


def _apply_bias(logits: Tensor, biases: tuple[tuple[int, float], ...]) -> Tensor:
    ids = torch.tensor([token for token, _ in biases], dtype=torch.int64, device="cpu")
    bias_values = torch.tensor([bias for _, bias in biases], dtype=torch.float64, device="cpu")
    return _replace_logits(logits, ids, logits[ids].double() + bias_values)


def _penalise_repeats(logits: Tensor, counts: Counter[int], sampling: Sampling) -> Tensor:
    if not counts:
        return logits
    repeated_ids = sorted(counts)
    ids = torch.tensor(repeated_ids, dtype=torch.int64, device="cpu")
    scores, penalty = logits[ids].double(), sampling.repetition_penalty
    if penalty != 1:
        scores = _clamped(torch.where(scores > 0, scores / penalty, scores * penalty))
    occurrences = [counts[token] for token in repeated_ids]
    repeats = torch.tensor(occurrences, dtype=torch.float64, device="cpu")
    scores = scores - sampling.presence_penalty - sampling.frequency_penalty * repeats
    return _replace_logits(logits, ids, scores)


def _replace_logits(logits: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    return logits.index_put((ids,), _clamped(scores).float())


def _clamped(scores: Tensor) -> Tensor:
    # To finite float32: infinity minus infinity would be NaN.
    return scores.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
