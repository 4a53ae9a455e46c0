"""What changes the logits before a token is chosen: biases, penalties, what is allowed at all."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument

_LARGEST = float(torch.finfo(torch.float32).max)


class Constraint(Protocol):
    """Says which tokens may come next, such as those that a grammar allows.

    It is asked before each token, and told each that was taken into the session. What a constraint
    remembers is its own: it is for one run of tokens, and no session saves it.

    It may have a `complete` too, a bool: whether its text is whole and no token may come any more.
    Generation ends there, as at the end of a text; a constraint without it ends by an end token.
    """

    def masked(self, logits: Tensor) -> Tensor:
        """The logits `[vocab]` float32, with -inf for what must not come; at least one may.

        The given ones stay as they are.
        """

    def accept(self, token: int) -> None:
        """That token was taken. It must not raise: the session has the token by now."""


class Penalties(Protocol):
    """The fields of `Sampling` that this file reads; it says what they mean."""

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


def penalised(logits: Tensor, tokens: Sequence[int], how: Penalties) -> Tensor:
    """The scores that a token is chosen by; the given logits where nothing changes them.

    logits: `[vocab]` float32, finite, on the CPU; tokens: all so far.
    """
    scores = _biased(logits, how.logit_bias) if how.logit_bias else logits
    if how.repetition_window and _any(how):
        scores = _repeated(scores, Counter(tokens[-how.repetition_window :]), how)
    return scores if how.constraint is None else how.constraint.masked(scores)


def _any(how: Penalties) -> bool:
    return bool(how.repetition_penalty != 1 or how.presence_penalty or how.frequency_penalty)


def _biased(logits: Tensor, biases: tuple[tuple[int, float], ...]) -> Tensor:
    largest, vocabulary = max(token for token, _ in biases), logits.shape[0]
    if largest >= vocabulary:
        raise InvalidArgument(
            f"tokens of logit_bias must be 0 to {vocabulary - 1}; found {largest}"
        )
    ids = torch.tensor([token for token, _ in biases], dtype=torch.int64, device="cpu")
    added = torch.tensor([bias for _, bias in biases], dtype=torch.float64, device="cpu")
    return _with(logits, ids, logits[ids].double() + added)


def _repeated(logits: Tensor, seen: Counter[int], how: Penalties) -> Tensor:
    if not seen:
        return logits
    recent = sorted(seen)
    ids = torch.tensor(recent, dtype=torch.int64, device="cpu")
    scores, factor = logits[ids].double(), how.repetition_penalty
    if factor != 1:
        scores = torch.where(scores > 0, scores / factor, scores * factor)
    times = torch.tensor([seen[token] for token in recent], dtype=torch.float64, device="cpu")
    scores = scores - how.presence_penalty - how.frequency_penalty * times
    return _with(logits, ids, scores)


def _with(logits: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """The logits with other scores for some tokens."""
    # As far as float32 goes: infinity less infinity would be no number.
    return logits.index_put((ids,), scores.clamp(-_LARGEST, _LARGEST).float())
