"""Random work of sessions in groups: each writes, to the bit, what it writes alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_model import packed_model, spec_of, spec_with_states
from torch import Tensor

from kvkeep import Sampling, SessionGroup
from kvkeep.compiled.binding import kernel_library
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.model import Model
from kvkeep.models.weights.packing import MatrixBits
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

SETTINGS: list[dict[str, Any]] = [
    {"policy": "full", "max_kv_size": 400},
    {"policy": "full", "max_kv_size": 400, "kv_bits": "8"},
    {"max_kv_size": 70},
    {"max_kv_size": 70, "kv_bits": "8/4"},
    {"max_kv_size": 90, "far_bits": "8", "keep": 10},
    {"max_kv_size": 60, "policy": "shift"},
    {"max_kv_size": 60, "policy": "shift", "kv_bits": "4"},
    {"max_kv_size": 400, "policy": "self_extend", "group": 2, "window": 32},
    {"max_kv_size": 200, "policy": "archive", "method": "knorm"},
]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1.3, top_p=0.9, min_p=0.01, seed=2),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=0.7, top_k=30, logit_bias=((5, 3.0),), seed=3),
]


class Ends:
    """A `Constraint`: each token has another last digit than the one before it."""

    def __init__(self) -> None:
        self.last = -1

    def masked(self, logits: Tensor) -> Tensor:
        digits = torch.arange(len(logits)) % 10
        return logits.masked_fill(digits == self.last, -torch.inf)

    def accept(self, token: int) -> None:
        self.last = token % 10


class Pair:
    """A session that writes in groups, and one that writes alone, with samplings of their own."""

    def __init__(self, together: Session, alone: Session, sampling: Sampling, constrained: bool):
        self.together, self.alone = together, alone
        self.samplings = [
            replace(sampling, constraint=Ends() if constrained else None) for _ in range(2)
        ]

    def do(self, what: str, *arguments: Any) -> None:
        for session in (self.together, self.alone):
            getattr(session, what)(*arguments)

    def require_same(self) -> None:
        one, other = self.together.logits, self.alone.logits
        assert self.together.tokens == self.alone.tokens
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def drawn(draw: random.Random, model: Model) -> Pair:
    settings = {**draw.choice(SETTINGS), "prefill_step": draw.choice((7, 32, 128))}
    pair = Pair(
        model.session(**settings),
        model.session(**settings),
        draw.choice(SAMPLINGS),
        draw.random() < 0.3,
    )
    pair.do("feed", [draw.randrange(1, 250) for _ in range(draw.choice((1, 20, 64, 100)))])
    return pair


def change(draw: random.Random, pair: Pair) -> None:
    """What may happen to a session between two groups; what its policy refuses does not."""
    kind = draw.choice(("feed", "rewind", "delete", "compress", "fork"))
    total = len(pair.alone.tokens)
    arguments: dict[str, Sequence[Any]] = {
        "feed": [[draw.randrange(1, 250) for _ in range(draw.choice((1, 9, 40)))]],
        "rewind": [draw.randrange(1, min(total, 12))] if total > 1 else [0],
        "delete": [max(0, total - 9), max(1, total - 6)],
        "compress": [2.0, "knorm"],
    }
    if kind == "fork":
        pair.together, pair.alone = pair.together.fork(), pair.alone.fork()
        return
    try:
        pair.do(kind, *arguments[kind])
    except (InvalidArgument, ContextFull):
        assert pair.together.tokens == pair.alone.tokens


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("seed", range(3))
def test_random_groups_generate_the_same_bits_as_single_sessions(
    bits: MatrixBits | None, seed: int
) -> None:
    require_alike(random.Random(seed), packed_model(spec_of(32), bits))


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", ["gemma3", "delta_net"])
def test_groups_with_local_layers_or_states_generate_the_same_bits(
    kind: str, bits: MatrixBits | None
) -> None:
    spec = spec_of(256, kind) if kind == "gemma3" else spec_with_states(kind)
    require_alike(random.Random(5), packed_model(spec, bits))


def require_alike(draw: random.Random, model: Model) -> None:
    """Require that sessions of a model generate in random groups what they generate alone."""
    pairs = [drawn(draw, model) for _ in range(9)]
    for _ in range(12):
        able = [pair for pair in pairs if pair.alone.room is None or pair.alone.room > 4]
        group = draw.sample(able, draw.randrange(1, len(able) + 1))
        together = SessionGroup([pair.together for pair in group])
        for _ in range(draw.randrange(1, 5)):
            written = together.next_tokens([pair.samplings[0] for pair in group])
            assert written == [pair.alone.next_token(pair.samplings[1]) for pair in group]
        for pair in group:
            pair.require_same()
        change(draw, draw.choice(pairs))
