"""Choosing the next token from logits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.penalties import Constraint, penalised

_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_COLDEST = float(np.finfo(np.float32).tiny)  # below it a division by the temperature overflows


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The default is greedy.

    Filters apply in the order: bias, penalties, constraint, temperature, top_k, top_p, min_p, as in
    transformers.

    temperature: divides the logits; 0 takes the likeliest token, and so does what float32 cannot
        divide by (below 1.2e-38).
    top_k: only the k likeliest, and those as likely as the last of them; 0 for all.
    top_p: the smallest set with at least this probability (nucleus, arXiv:1904.09751).
    min_p: only tokens at least this fraction of the likeliest (arXiv:2407.01082).
    repetition_penalty: divides positive and multiplies negative logits of tokens that occur in
        the last `repetition_window` (CTRL, arXiv:1909.05858); 1 is off.
    presence_penalty: subtracted from the logits of tokens that occur in that window.
    frequency_penalty: the same, once for each time that a token occurs.
    seed: the same seed gives the same tokens; None draws one from the system.
    stop: `Session.stream` ends before the first of these strings.
    logit_bias: pairs of a token id and what is added to its logit.
    constraint: says which tokens may come at all, such as a grammar; it is told each that came, so
        that one is for one run of tokens in one session.
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
        for name in _NUMBERS:
            self._set(name, validation.number(name, getattr(self, name)))
        for name in ("top_k", "repetition_window"):
            self._set(name, validation.whole(name, getattr(self, name), 0))
        self._set("seed", validation.optional_whole("seed", self.seed, 0))
        self._set("stop", _stop_strings(self.stop))
        self._set("logit_bias", _biases(self.logit_bias))
        _require(self.temperature >= 0, "temperature", "0 or more", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0, at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "0 to 1", self.min_p)
        penalty = self.repetition_penalty
        _require(penalty > 0, "repetition_penalty", "above 0", penalty)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing drawn."""
        return self.temperature < _COLDEST

    @property
    def complete(self) -> bool:
        """Whether the constraint lets no token come any more, so that generation ends."""
        return bool(getattr(self.constraint, "complete", False))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def require_own_constraints(samplings: Sequence[Sampling], used: Iterable[Sampling] = ()) -> None:
    """Raises InvalidArgument where two samplings, or one and a used one, share a constraint.

    used: of sessions that sample at the same time.
    """
    taken = {id(how.constraint): "one in use" for how in used if how.constraint is not None}
    for index, how in enumerate(samplings):
        if how.constraint is None:
            continue
        if other := taken.get(id(how.constraint)):
            raise InvalidArgument(
                f"sampling {index} has the same constraint object as {other}: a constraint follows "
                "the tokens of one session; make one for each, in a Sampling of its own"
            )
        taken[id(how.constraint)] = f"sampling {index}"


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, bias) for token, bias in cast(Iterable[tuple[object, object]], given)]
    except (TypeError, ValueError):
        _require(False, "logit_bias", "pairs of a token id and a number", given)
    return tuple(
        (validation.whole("a token of logit_bias", token, 0), validation.number("logit_bias", bias))
        for token, bias in pairs
    )


def _stop_strings(given: object) -> tuple[str, ...]:
    wanted = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
    _require(wanted, "stop", "a tuple of strings, none empty", given)
    strings = tuple(validation.text("stop", each) for each in cast(Iterable[object], given))
    _require(all(strings), "stop", "a tuple of strings, none empty", given)
    return strings


def _require(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise InvalidArgument(f"{name} must be {expected}; found {found!r}")


class Sampler:
    """Draws tokens. Its only state is the random generator, made anew when the seed changes."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._random: np.random.Generator | None = None

    def state(self) -> dict[str, Any]:
        """The seed and the generator's state, as JSON values; {} if nothing was drawn yet."""
        if self._random is None:
            return {}
        return {"seed": self._seed, "generator": self._random.bit_generator.state}

    @classmethod
    def at(cls, state: Mapping[str, Any]) -> "Sampler":
        """The sampler whose `state()` that was. Raises InvalidArgument for what was none."""
        sampler = cls()
        if not state:
            return sampler
        try:
            sampler._seed = validation.optional_whole("seed", state["seed"], 0)
            sampler._random = np.random.Generator(np.random.PCG64(0))
            sampler._random.bit_generator.state = state["generator"]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"a sampler must have a seed and a state of NumPy's PCG64; found {error!r}"
            ) from error
        return sampler

    def choose(self, logits: Tensor, tokens: Sequence[int], how: Sampling) -> int:
        """A token id. logits: `[vocab]` float32, finite; tokens: all so far, for the penalty."""
        if how.greedy:
            return _likeliest_of(penalised(logits.cpu(), tokens, how))
        ids, weights = distribution(logits, tokens, how)
        cumulative = weights.double().cumsum(-1)
        mark = self._uniform(how.seed) * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, mark, right=True))
        return int(ids[min(index, ids.shape[0] - 1)])

    def _uniform(self, seed: int | None) -> float:
        if self._random is None or seed != self._seed:
            self._seed, self._random = seed, np.random.Generator(np.random.PCG64(seed))
        return float(self._random.random())


def distribution(logits: Tensor, tokens: Sequence[int], how: Sampling) -> tuple[Tensor, Tensor]:
    """What a token is drawn from: ids `[n]`, and their weights, which need not add up to 1.

    logits: `[vocab]` float32, finite; tokens: all so far, for the penalty.
    """
    scores = penalised(logits.cpu(), tokens, how)  # float64 is not on every device
    if how.greedy:
        ids = torch.tensor([_likeliest_of(scores)], dtype=torch.int64, device="cpu")
        return ids, torch.ones(1, dtype=torch.float32, device="cpu")
    scores = (scores - scores.max()) / how.temperature
    return _filtered(scores.softmax(-1), _likeliest(scores, how.top_k), how)


def _likeliest_of(scores: Tensor) -> int:
    """By numpy: for a vector, waking torch's threads takes longer than the search."""
    return int(scores.numpy().argmax())


def _likeliest(scores: Tensor, count: int) -> Tensor | None:
    """The ids of the `count` greatest scores, and of those equal to the last; None for all."""
    if not 0 < count < scores.shape[0]:
        return None
    # By scores: probabilities of unequal ones may both be 0.
    greatest, ids = scores.topk(count + 1)
    if greatest[-1] < greatest[-2]:
        return ids[:-1]
    return (scores >= greatest[-2]).nonzero().squeeze(-1)


def _filtered(probabilities: Tensor, ids: Tensor | None, how: Sampling) -> tuple[Tensor, Tensor]:
    """Of these ids (None: all) those in the nucleus and above `min_p`, with their weights."""
    if ids is None and how.top_p == 1 and how.min_p == 0:
        every = torch.arange(probabilities.shape[0], dtype=torch.int64, device="cpu")
        return every, probabilities
    mass = 1.0
    if ids is None:
        # Tokens below (1 - top_p) / vocab have less than 1 - top_p together, so none of them is
        # in the nucleus: only the rest, mostly a handful, needs sorting.
        floor = (1 - how.top_p) / probabilities.shape[0]
        ids = (probabilities >= floor).nonzero().squeeze(-1)
    else:
        mass = float(probabilities[ids].double().sum())
    weights, order = probabilities[ids].sort(descending=True, stable=True)
    inside = weights >= how.min_p * weights[0]
    if how.top_p < 1:
        inside &= weights.double().cumsum(-1) - weights < how.top_p * mass
    inside[0] = True
    return ids[order][inside], weights[inside]
