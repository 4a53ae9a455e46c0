"""The decode step that a CUDA graph replays: on a CPU the same code runs without the graph."""

import pytest
import torch
from small import small_model

from kvkeep.cache.static import geometry
from kvkeep.cache.step import DecodeStep
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.graph import DecodeGraphs, GraphExecutor
from kvkeep.models.layers.network import Network
from kvkeep.session.session import Session

PROMPT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]
SETTINGS: list[dict[str, object]] = [
    {"max_kv_size": 64},
    {"max_kv_size": 64, "keep": 0},
    {"max_kv_size": 50, "policy": "shift", "discard": 10},
    {"policy": "full"},
]


class Counting(DecodeGraphs):
    """How many tokens went each way."""

    replayed = 0
    others = 0

    def hidden(self, tokens, step):  # type: ignore[no-untyped-def]
        found = super().hidden(tokens, step)
        if found is None:
            self.others += 1
        else:
            self.replayed += 1
        return found


def graphed() -> tuple[Model, Counting]:
    model = small_model()
    executor = GraphExecutor(Network(model.spec, model.decoder.tensors))
    executor.graphs = counting = Counting(executor.graphs.forward)
    model.decoder = Decoder(model.spec, model.decoder.tensors, executor=executor)
    return model, counting


def last(session: Session) -> torch.Tensor:
    logits = session.logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_says_what_the_ordinary_step_says(settings: dict[str, object]) -> None:
    model, _ = graphed()
    here, there = (m.session(**settings) for m in (model, small_model()))  # type: ignore[arg-type]
    for session in (here, there):
        session.feed(PROMPT)
    for _ in range(100):
        assert here.next_token() == there.next_token()
        assert (last(here) - last(there)).abs().max() <= 1e-5


def test_a_full_ring_is_replayed_and_a_growing_memory_is_not() -> None:
    model, counting = graphed()
    session = model.session(max_kv_size=64)
    session.feed(PROMPT[:60])
    for _ in range(30):
        session.next_token()
    # 4 tokens until it is full, one in which its shape is first seen, and the rest.
    assert (counting.others, counting.replayed) == (5, 25)
    whole = model.session(policy="full")
    whole.feed(PROMPT[:60])
    before = counting.replayed
    for _ in range(30):
        whole.next_token()
    assert counting.replayed == before


def test_sessions_that_take_turns_stay_apart() -> None:
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
    assert counting.replayed >= 20


def test_a_fork_of_a_replayed_session_goes_its_own_way() -> None:
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
def test_a_ring_that_hides_cells_has_no_lasting_geometry() -> None:
    session = small_model().session(max_kv_size=50, policy="shift", discard=10)
    session.feed(PROMPT[:200])
    found = []
    for _ in range(12):
        with session.cache.step(1) as step:
            assert isinstance(step, DecodeStep)
            found.append(geometry(step))
            session.core.model.decoder.hidden(torch.tensor([5]), step)
    assert None in found
