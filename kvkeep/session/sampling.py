"""The sampling parameters of a request, and constraints such as grammars."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.stop_gate import ReasoningMarkers

_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # dividing by less overflows float32


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
    transformers. Whatever they are, the `suppressed_tokens` of the model are not sampled.

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
    reasoning: the markers of reasoning at the answer's beginning, in which the strings of `stop`
        count for nothing; None where there is none.
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
    reasoning: ReasoningMarkers | None = None
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
