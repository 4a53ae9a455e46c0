"""Changes to logits before sampling: biases, penalties and constraints."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument

_LARGEST = float(torch.finfo(torch.float32).max)


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


class Penalties(Protocol):
    """The fields of `Sampling` that this module reads; see there."""

    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_window(self) -> int: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def constraint(self) -> Constraint | None: ...


def penalised(logits: Tensor, tokens: Sequence[int], sampling: Penalties) -> Tensor:
    """Return the scores to sample from; the argument itself if nothing changes.

    logits: `[vocab]` float32, finite, on the CPU. tokens: all so far.
    """
    scores = _biased(logits, sampling.logit_bias) if sampling.logit_bias else logits
    window = sampling.repetition_window
    if window and _penalises(sampling):
        scores = _penalise_repeats(scores, Counter(tokens[-window:]), sampling)
    return scores if sampling.constraint is None else sampling.constraint.masked(scores)


def _penalises(sampling: Penalties) -> bool:
    return bool(
        sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )


def _biased(logits: Tensor, biases: tuple[tuple[int, float], ...]) -> Tensor:
    largest, vocabulary = max(token for token, _ in biases), logits.shape[0]
    if largest >= vocabulary:
        raise InvalidArgument(
            f"tokens of logit_bias must be 0 to {vocabulary - 1}; found {largest}"
        )
    ids = torch.tensor([token for token, _ in biases], dtype=torch.int64, device="cpu")
    added = torch.tensor([bias for _, bias in biases], dtype=torch.float64, device="cpu")
    return _with_scores(logits, ids, logits[ids].double() + added)


def _penalise_repeats(logits: Tensor, counts: Counter[int], sampling: Penalties) -> Tensor:
    if not counts:
        return logits
    recent = sorted(counts)
    ids = torch.tensor(recent, dtype=torch.int64, device="cpu")
    scores, factor = logits[ids].double(), sampling.repetition_penalty
    if factor != 1:
        scores = torch.where(scores > 0, scores / factor, scores * factor)
    times = torch.tensor([counts[token] for token in recent], dtype=torch.float64, device="cpu")
    scores = scores - sampling.presence_penalty - sampling.frequency_penalty * times
    return _with_scores(logits, ids, scores)


def _with_scores(logits: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Return the logits with other scores for some tokens."""
    # Clamped to finite float32: infinity minus infinity would be NaN.
    return logits.index_put((ids,), scores.clamp(-_LARGEST, _LARGEST).float())
