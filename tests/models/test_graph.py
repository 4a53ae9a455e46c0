"""The decode step that a CUDA graph replays: on a CPU the same code runs without the graph."""

import pytest
import torch
from small_models import small_model
from torch import Tensor

from kvkeep.cache.static import replay_key
from kvkeep.cache.step import DecodeStep
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import GraphExecutor
from kvkeep.models.layers.network import Network
from kvkeep.session.session import Session

PROMPT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]
SETTINGS: list[dict[str, object]] = [
    {"max_kv_size": 64},
    {"max_kv_size": 64, "keep": 0},
    {"max_kv_size": 50, "policy": "shift", "discard": 10},
    {"policy": "full"},
]


class CountingExecutor(GraphExecutor):
    """Counts the decode steps that were replayed, and those that were not."""

    replayed_steps = 0
    other_steps = 0

    def replay(self, tokens: Tensor, step: DecodeStep) -> Tensor | None:
        hidden = super().replay(tokens, step)
        if hidden is None:
            self.other_steps += 1
        else:
            self.replayed_steps += 1
        return hidden


def graphed() -> tuple[Model, CountingExecutor]:
    model = small_model()
    executor = CountingExecutor(Network(model.spec, model.decoder.tensors))
    model.decoder = Decoder(model.spec, model.decoder.tensors, executor=executor)
    return model, executor


def last(session: Session) -> torch.Tensor:
    logits = session.logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_replayed_step_equals_the_ordinary_one(settings: dict[str, object]) -> None:
    model, _ = graphed()
    here, there = (m.session(**settings) for m in (model, small_model()))  # type: ignore[arg-type]
    for session in (here, there):
        session.feed(PROMPT)
    for _ in range(100):
        assert here.next_token() == there.next_token()
        assert (last(here) - last(there)).abs().max() <= 1e-5


def test_steps_of_a_full_ring_are_replayed_and_of_a_growing_cache_are_not() -> None:
    model, counting = graphed()
    session = model.session(max_kv_size=64)
    session.feed(PROMPT[:60])
    for _ in range(30):
        session.next_token()
    # 4 tokens until it is full, one in which its shape is first seen, and the rest.
    assert (counting.other_steps, counting.replayed_steps) == (5, 25)
    whole = model.session(policy="full")
    whole.feed(PROMPT[:60])
    before = counting.replayed_steps
    for _ in range(30):
        whole.next_token()
    assert counting.replayed_steps == before


def test_sessions_that_alternate_do_not_affect_each_other() -> None:
    model, counting = graphed()
    plain = small_model()
    pairs = []
    for start in (0, 50):
        pair = [m.session(max_kv_size=48) for m in (model, plain)]
        for session in pair:
            session.feed(PROMPT[start : start + 100])
        pairs.append(pair)
    for turn in range(40):
        here, there = pairs[turn // 5 % 2]
        assert here.next_token() == there.next_token()
        assert (last(here) - last(there)).abs().max() <= 1e-5
    assert counting.replayed_steps >= 20


def test_a_fork_of_a_replayed_session_is_independent() -> None:
    model, _ = graphed()
    session, there = model.session(max_kv_size=48), small_model().session(max_kv_size=48)
    for each in (session, there):
        each.feed(PROMPT[:100])
        for _ in range(10):
            each.next_token()
    fork, other = session.fork(), there.fork()
    for here, plain in ((session, there), (fork, other)):
        here.feed([9])
        plain.feed([9])
        for _ in range(20):
            assert here.next_token() == plain.next_token()
            assert (last(here) - last(plain)).abs().max() <= 1e-5


@torch.inference_mode()
def test_a_ring_with_hidden_cells_has_no_static_geometry() -> None:
    session = small_model().session(max_kv_size=50, policy="shift", discard=10)
    session.feed(PROMPT[:200])
    found = []
    for _ in range(12):
        with session.cache.step(1) as step:
            assert isinstance(step, DecodeStep)
            found.append(replay_key(step))
            session.core.model.decoder.forward(torch.tensor([5]), step)
    assert None in found
