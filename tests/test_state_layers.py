"""Sessions of models in which some layers keep a state instead of cells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_snapshots import altered
from attention_hooks import attending
from engine.workload import Request, batch
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import same, whole_state
from small_models import small_model, state_specs

from kvkeep import Sampling, SessionGroup, Snapshot
from kvkeep.engine import Engine
from kvkeep.errors import InvalidArgument, InvalidSnapshot
from kvkeep.model import Model
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.states import causal_convolution
from kvkeep.session.session import Session
from tests.examples import examples

MODELS = {kind: small_model(spec=spec) for kind, spec in state_specs().items()}
TEXT = [(17 * i * i + 5 * i) % 251 + 1 for i in range(150)]
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"max_kv_size": 400, "policy": "full"},
    "sliding": {"max_kv_size": 48, "policy": "sliding"},
    "shift": {"max_kv_size": 48, "policy": "shift"},
    "archive": {"max_kv_size": 64, "policy": "archive", "method": "knorm"},
    "self_extend": {"max_kv_size": 400, "policy": "self_extend", "group": 4, "window": 32},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def fed(model: Model, tokens: list[int] = TEXT, **options: Any) -> Session:
    session = model.session(**{"max_kv_size": 400, "policy": "full", "prefill_step": 50} | options)
    session.feed(tokens)
    return session


@settings(max_examples=examples(12), deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.lists(st.integers(1, 16), min_size=1, max_size=9))
def test_logits_and_states_do_not_depend_on_the_steps(kind: str, counts: list[int]) -> None:
    tokens = TEXT[: sum(counts)]
    whole, stepwise = fed(MODELS[kind], tokens, prefill_step=512), MODELS[kind].session(400)
    for count in counts:
        stepwise.feed(tokens[len(stepwise.tokens) : len(stepwise.tokens) + count])
    torch.testing.assert_close(stepwise.logits, whole.logits, rtol=1e-4, atol=1e-3)
    expected, states = whole.cache.recurrent_states, stepwise.cache.recurrent_states
    assert states.keys() == expected.keys()
    for name, state in states.items():
        torch.testing.assert_close(state, expected[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_is_the_same_to_the_bit_however_it_is_cut(dtype: torch.dtype) -> None:
    inputs, kernel = torch.randn(1, 3 + 40, 24).to(dtype), torch.randn(24, 1, 4).to(dtype)
    whole = causal_convolution(inputs, kernel, None)
    parts = [
        causal_convolution(inputs[:, first : first + 3 + count], kernel, None)
        for first, count in ((0, 1), (1, 7), (8, 31), (39, 1))
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_states_take_the_same_bytes_after_any_number_of_tokens(model: Model) -> None:
    expected = model.spec.states.nbytes(torch.float32)
    for count in (1, 2, 50, 150):
        states = fed(model, TEXT[:count]).cache.recurrent_states.values()
        assert sum(state.untyped_storage().nbytes() for state in states) == expected


@pytest.mark.parametrize("bits", [{}, {"kv_bits": "8"}, {"kv_bits": "8/4"}, {"far_bits": "8"}])
@pytest.mark.parametrize("policy", POLICIES)
def test_forks_and_snapshots_continue_to_the_bit(
    model: Model, policy: str, bits: dict[str, str], tmp_path: Path
) -> None:
    if policy == "full" and "far_bits" in bits:
        bits = {"kv_bits": "4"}
    session = fed(model, **POLICIES[policy], **bits)
    assert session.cache.cells <= session.max_kv_size
    session.snapshot().save(tmp_path / "a.kvkeep", codec="zstd")
    before = whole_state(session)
    fork = session.fork()  # whose cells are cut where it begins, so that sums have another order
    loaded = model.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    others = [fork, loaded, model.restore(session.snapshot())]
    tokens = [session.next_token() for _ in range(20)]
    session.feed(TEXT[:30])
    for other in others:
        assert same(whole_state(other)["states"], before["states"])
        assert [other.next_token() for _ in range(20)] == tokens
        other.feed(TEXT[:30])
        most = 0.05 if other is fork else 0.0
        torch.testing.assert_close(other.logits, session.logits, rtol=0, atol=most)


def test_a_group_equals_its_sessions_alone(model: Model) -> None:
    sessions = [fed(model, TEXT[:9]), fed(model, max_kv_size=48, policy="sliding")]
    sessions.append(sessions[1].fork())
    sessions[2].feed([7, 8])
    alone = [session.fork() for session in sessions]
    group = SessionGroup(sessions)
    for _ in range(12):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for session, other in zip(sessions, alone, strict=True):
        torch.testing.assert_close(session.logits, other.logits, rtol=1e-4, atol=1e-3)
        for name, state in session.cache.recurrent_states.items():
            expected = other.cache.recurrent_states[name]
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-3)


class ForwardFailed(Exception):
    """Raised in the middle of a forward."""


@pytest.mark.parametrize("count", [1, 30])
def test_a_step_that_fails_changes_no_state(model: Model, count: int) -> None:
    session, untouched = fed(model), fed(model)
    before = whole_state(session)

    def failing(step: AnyStep, layer: int, *args: torch.Tensor) -> torch.Tensor:
        if layer == 3:  # after two of the state layers
            raise ForwardFailed
        return step.attend(layer // 2, *args)

    with attending(model.decoder, failing), pytest.raises(ForwardFailed):
        session.feed(TEXT[:count])
    assert same(whole_state(session), before)
    session.feed(TEXT[:count])
    untouched.feed(TEXT[:count])
    assert torch.equal(session.logits, untouched.logits)


REFUSED: dict[str, Callable[[Session], object]] = {
    "delete": lambda session: session.delete(3, 5),
    "insert": lambda session: session.insert(4, [7, 8]),
    "replace": lambda session: session.replace(4, 6, [9]),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_would_change_a_state_is_refused_by_name(model: Model, operation: str) -> None:
    session = fed(model)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="some layers of the model keep states"):
        REFUSED[operation](session)
    assert same(whole_state(session), before)
    session.rewind(len(TEXT))  # taking back everything is always possible
    assert not session.cache.recurrent_states
    session.feed(TEXT)
    assert torch.equal(session.logits, fed(model).logits)


def test_pins_and_bounds_are_of_the_layers_that_attend(model: Model) -> None:
    session = fed(model, TEXT[:40], max_kv_size=48, policy="sliding")
    session.pin(10, 14)
    session.feed(TEXT)
    assert session.token_status[10:14] == ["pinned"] * 4
    assert session.cache.cells == 48
    assert session.cache.layout.layers == 2


def test_snapshots_with_other_states_are_refused(model: Model) -> None:
    snapshot = fed(model).snapshot()
    states = dict(snapshot.recurrent)
    name = next(iter(states))
    more_values = torch.cat((states[name], states[name]))
    for changed in (
        {},
        {key: state for key, state in states.items() if key != name},
        {**states, "layers.1.conv": states[name]},
        {**states, name: more_values},
        {**states, name: states[name].double()},
        {**states, name: torch.full_like(states[name], torch.nan)},
    ):
        with pytest.raises(InvalidSnapshot, match="state"):
            model.restore(altered(snapshot, recurrent_states=changed))


def test_an_engine_answers_as_a_session_alone(model: Model) -> None:
    requests = [Request(tuple(TEXT[:count]), 12) for count in (20, 90, 140)]
    with Engine(model, settings={"max_kv_size": 400, "prefill_step": 32}) as engine:
        results = [result for (result,) in batch(engine, requests)]
        # What continues after a session's last, sampled token takes the session over.
        longer = (*results[0].tokens, 7, 8, 9)
        (continued,) = Request(longer, 4).do(engine)
    for request, result in zip(requests, results, strict=True):
        session = fed(model, list(request.prompt), policy="sliding", prefill_step=32)
        assert result.written == [session.next_token(Sampling()) for _ in range(12)]
    assert continued.reuse.tokens == len(results[0].tokens)
