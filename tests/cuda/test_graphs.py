"""Decode steps of a full ring, replayed by a CUDA graph, equal the ordinary ones."""

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from cuda.conftest import Placed
from small_models import unrotated_spec

from kvkeep.model import Model
from kvkeep.models.layers.executor import GraphExecutor
from kvkeep.session.session import Session

PROMPT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(400)]
SETTINGS: dict[str, dict[str, Any]] = {
    "sliding": {"max_kv_size": 64},
    "without anchors": {"max_kv_size": 64, "keep": 0},
    "shift": {"max_kv_size": 50, "policy": "shift", "discard": 10},
    "8-bit anchors": {"max_kv_size": 64, "keep": 9, "far_bits": "8"},
    "self-extend": {"max_kv_size": 800, "policy": "self_extend", "group": 4, "window": 32},
    "archive": {"max_kv_size": 96, "policy": "archive", "window": 48},
}


def graph_of(model: Model) -> Any:
    """The recorded graph; on a CPU, what would record it. None if the last step was no replay."""
    executor = model.decoder.executor
    assert isinstance(executor, GraphExecutor)
    graph = executor._graph
    if graph is None or not torch.cuda.is_available():
        return graph
    return graph._recording


def require_same(session: Session, there: Session) -> None:
    one, other = session.logits, there.logits
    assert one is not None
    assert other is not None
    assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp_min(1)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replayed_step_equals_the_ordinary_one(name: str, placed: Placed) -> None:
    model = placed(unrotated_spec())
    here, there = (m.session(**SETTINGS[name]) for m in (model, placed(unrotated_spec(), True)))
    for session in (here, there):
        session.feed(PROMPT)
    replayed = 0
    for _ in range(150):
        assert here.next_token() == there.next_token()
        require_same(here, there)
        replayed += graph_of(model) is not None
    if name in ("sliding", "without anchors"):
        assert replayed == 149


def random_change(random: Random, held: int) -> Callable[[Session], Any]:
    """A change of a session whose newest `held` tokens have cells, as a function of it."""
    count, token = random.randint(1, 6), random.randrange(1, 255)
    back = random.randint(count + 2, min(30, held - 5))  # tokens before the end
    kind = random.choice(("delete", "insert", "replace", "rewind", "feed", "keep", "pin", "score"))
    ids = [(token + i * i) % 254 + 1 for i in range(count)]

    def change(session: Session) -> Any:
        at = len(session.tokens) - back
        if kind == "delete":
            return session.delete(at, at + count)
        if kind == "insert":
            return session.insert(at, ids)
        if kind == "replace":
            return session.replace(at, at + count, ids)
        if kind == "rewind":
            return session.rewind(min(count, 3))
        if kind == "feed":
            return session.feed(ids * 3)
        if kind == "keep":
            session.keep = count
            return None
        if kind == "pin":
            return session.pin(at, at + count)
        return session.score(ids)

    return change


@pytest.mark.parametrize("seed", range(6))
def test_changes_between_replays_leave_no_stale_graph(seed: int, placed: Placed) -> None:
    """Edits, rewinds, forks and snapshots, of sessions that take turns."""
    random, model, plain = Random(seed), placed(), placed(plain=True)
    pairs = []
    for start in (0, 50):
        pair = [m.session(max_kv_size=64, prefill_step=24) for m in (model, plain)]
        for session in pair:
            session.feed(PROMPT[start : start + 150])
        pairs.append(pair)
    replayed = 0
    for turn in range(40):
        index = random.randrange(len(pairs))
        here, there = pairs[index]
        what = random.random()
        if what < 0.15 and len(pairs) < 4:
            pairs.append([here.fork(), there.fork()])
        elif what < 0.3:
            pairs[index] = [
                model.restore(here.snapshot()),
                plain.restore(there.snapshot()),
            ]
        elif what < 0.8:
            change = random_change(random, 45)
            results = []
            for session in (here, there):
                try:
                    change(session)
                    results.append(None)
                except Exception as error:  # the same of both, such as a span that is forgotten
                    results.append(type(error))
            assert results[0] == results[1]
        here, there = pairs[index]
        for _ in range(random.randint(1, 14)):
            assert here.next_token() == there.next_token(), turn
            require_same(here, there)
            replayed += graph_of(model) is not None
    assert replayed > 20


def test_other_threads_may_use_the_gpu_while_a_graph_is_recorded(
    placed: Placed, device: torch.device
) -> None:
    model, plain = placed(), placed(plain=True)
    done, errors = threading.Event(), []

    def allocate() -> None:
        count = 0
        try:
            while not done.is_set():
                x = torch.ones(1000 + 1000 * (count % 997), device=device)
                float((x * 2).sum())
                count += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for start in range(0, 100, 10):
            here, there = (m.session(max_kv_size=48) for m in (model, plain))
            for session in (here, there):
                session.feed(PROMPT[start : start + 100])
            for _ in range(8):
                assert here.next_token() == there.next_token()
                require_same(here, there)
            assert graph_of(model) is not None
    finally:
        done.set()
        thread.join()
    assert errors == []
