"""Prompts of models with local layers or states are reused from checkpoints, to the bit."""

from pathlib import Path
from typing import Any

import pytest
from edit_actions import LOCAL_MODEL
from engine.random_workload import World
from engine.test_reuse import require_alike
from engine.workload import Create, Fork, Request, Result, Work
from packed_model import STATE_LAYERS, packed_model, spec_of, spec_with_states
from small_models import small_model, state_specs

from kvkeep.compiled.binding import kernel_library
from kvkeep.engine import Engine
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.model import Model

MODELS = {"local": LOCAL_MODEL}
MODELS |= {kind: small_model(spec=spec) for kind, spec in state_specs().items()}
SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": 2000, "prefill_step": 32}


def text(count: int, seed: int = 7) -> tuple[int, ...]:
    return tuple((i * i * seed + 3 * i) % 250 + 1 for i in range(count))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def last_result(model: Model, works: list[Work], **settings: Any) -> Result:
    """Return the result of the last request, after the others in the same engine."""
    with Engine(model, settings={**SETTINGS, **settings}) as engine:
        results = [work.do(engine) for work in works][-1]
    assert results is not None
    return results[0]


def require_alone(model: Model, works: list[Work], **settings: Any) -> Result:
    """Require that earlier requests change no bit of the last one; return its result."""
    result = last_result(model, works, **settings)
    assert result.same(last_result(model, works[-1:], **settings))
    return result


def test_the_same_prompt_is_evaluated_from_its_last_step_on(model: Model) -> None:
    result = require_alone(model, [Request(text(500), 5), Request(text(500), 8)])
    assert result.reuse.tokens == 496


def test_another_last_question_is_evaluated_from_the_step_before_it_on(model: Model) -> None:
    question = text(30, 11)
    result = require_alone(model, [Request(text(470), 5), Request(text(440) + question, 8)])
    assert result.reuse.tokens == 432


@pytest.mark.parametrize("common", [20, 250, 450])
def test_what_is_evaluated_again_grows_with_the_distance_from_the_end(
    model: Model, common: int
) -> None:
    result = require_alone(model, [Request(text(500), 3), Request(text(common) + text(80, 11), 8)])
    assert common - result.reuse.tokens <= 32 + (500 - common)


def test_a_beginning_that_was_reused_stays(model: Model) -> None:
    """A system prompt is evaluated twice at most, however long the chats after it are."""
    system = text(100)
    works = [Request(system + text(600, seed), 2) for seed in (11, 13, 17)]
    result = require_alone(model, works)
    assert result.reuse.tokens == 96


def test_without_bytes_for_checkpoints_nothing_is_reused(model: Model) -> None:
    works = [Request(text(500), 5), Request(text(500), 8)]
    reuse = require_alone(model, works, checkpoint_bytes=0).reuse
    assert (reuse.tokens, reuse.reason) == (0, "no_checkpoint")


def test_a_session_that_was_on_disk_is_reused_as_before(model: Model, tmp_path: Path) -> None:
    asked, again = Request(text(500), 5, session="a"), Request(text(440) + text(30, 11), 8)
    expected = last_result(model, [again])
    with Engine(model, settings=SETTINGS, folder=tmp_path) as engine:
        Create("a", ()).do(engine)
        asked.do(engine)
    with Engine(model, settings=SETTINGS, folder=tmp_path) as engine:
        Fork("a", None, "b").do(engine)  # which loads it
        (result,) = again.do(engine)
    assert result.reuse.tokens == 416
    assert result.same(expected)


def test_a_turn_after_the_answer_goes_on_from_its_cells(model: Model) -> None:
    first = Request(text(300), 5)
    answer = last_result(model, [first]).tokens
    result = last_result(model, [first, Request(tuple(answer) + text(20, 3), 8)])
    assert result.reuse.tokens == 305


def test_a_turn_after_a_named_session_that_evicted_tokens_is_evaluated(model: Model) -> None:
    settings: dict[str, Any] = {"policy": "sliding", "max_kv_size": 64}
    works: list[Work] = [Create("long", ()), Request(text(100), 10, session="long")]
    result = last_result(model, works, **settings)
    works.append(Request(tuple(result.tokens) + text(20, 3), 4))
    assert require_alone(model, works, **settings).reuse.reason == "forgotten"


@pytest.mark.parametrize("sizes", [(1, 2, 3), (5, 40, 33), (200, 300)])
def test_what_is_reserved_for_a_session_covers_its_checkpoints(
    model: Model, sizes: tuple[int, ...]
) -> None:
    session = model.session(800, policy="full", prefill_step=32)
    for message in range(90):
        count = sizes[message % len(sizes)]
        if session.room is None or session.room < count:
            break
        if message % 3 == 0:
            session.keep_checkpoint_at((len(session.tokens) + count) // 32 * 32)
        reserved = max_session_bytes(session, count)
        session.feed(text(count, message + 3))
        assert session.nbytes <= reserved


def test_sessions_from_snapshots_have_the_engine_s_limit(tmp_path: Path) -> None:
    settings = {**SETTINGS, "checkpoint_bytes": 1000}
    with Engine(LOCAL_MODEL, settings=settings, folder=tmp_path) as engine:
        Create("a", ()).do(engine)
        Request(text(100), 2, session="a").do(engine)
        engine.snapshot("a", "label").result()
        snapshot = engine.load_snapshot("label")
        restored = engine.restore("label", name="b").result()
        borrowed = engine.call(engine.borrowed.load, snapshot, "c", "0").result()
        assert restored.live.checkpoint_bytes == borrowed.live.checkpoint_bytes == 1000


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_random_generations_equal_the_request_alone(name: str, disk: bool, tmp_path: Path) -> None:
    """With torch, where rows of larger forward passes differ by rounding: one at a time."""
    settings = {**SETTINGS, "max_kv_size": 600, "prefill_step": 64}
    require_alike(World(MODELS[name], settings, 1, tmp_path if disk else None, company=False), 10)


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize(
    ("family", "head_dim"),
    [
        ("gemma3", 256),
        ("delta_net", 64),
        *(pytest.param(x, 64, marks=pytest.mark.slow) for x in ("gpt-oss", "mamba2")),
    ],
)
def test_concurrent_generations_equal_the_request_alone(
    family: str, head_dim: int, tmp_path: Path
) -> None:
    states = family in STATE_LAYERS
    spec = spec_with_states(family) if states else spec_of(head_dim, family)
    packed = packed_model(spec, None)
    require_alike(World(packed, {**SETTINGS, "max_kv_size": 600}, 3, tmp_path), 14)
