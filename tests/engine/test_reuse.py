"""What an engine reuses of earlier prompts changes no bit of a generation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.random_workload import World
from engine.workload import Change, Create, Fork, Request, Result, Work
from packed_model import packed_model, spec_of
from small_models import small_model

from kvkeep.compiled.binding import kernel_library
from kvkeep.engine import Engine
from kvkeep.engine.session_files import ENGINE_NOTES_KEY
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.snapshot import Snapshot

MODEL = small_model()
FULL: dict[str, Any] = {"policy": "full", "max_kv_size": 600}
SETTINGS: list[dict[str, Any]] = [
    {**FULL, "prefill_step": 32},
    {"max_kv_size": 300, "prefill_step": 128},
    {"max_kv_size": 300, "policy": "shift", "prefill_step": 48},
    {**FULL, "kv_bits": "8", "prefill_step": 128},
    {"max_kv_size": 300, "kv_bits": "8/4", "prefill_step": 32},
    {"max_kv_size": 300, "far_bits": "8", "prefill_step": 64},
    {"max_kv_size": 600, "policy": "self_extend", "group": 2, "window": 64, "prefill_step": 32},
    {"max_kv_size": 300, "policy": "archive", "method": "knorm", "prefill_step": 32},
    {"max_kv_size": 300, "keep": -1, "prefill_step": 33},
    {**FULL, "prefill_step": 15},
]


def text(count: int, seed: int = 7) -> tuple[int, ...]:
    return tuple((i * i * seed + 3 * i) % 250 + 1 for i in range(count))


def answered(settings: dict[str, Any], works: list[Work], **places: Any) -> Result:
    """The result of the last work, a request, after the others in the same engine."""
    with Engine(MODEL, settings=settings, **places) as engine:
        results = [work.do(engine) for work in works][-1]
    assert results is not None
    return results[0]


def require_alone(settings: dict[str, Any], works: list[Work], **places: Any) -> Result:
    result = answered(settings, works, **places)
    assert result.same(answered(settings, works[-1:]))
    return result


@pytest.mark.parametrize(
    "earlier",
    [Request(text(50), 0), Request(text(200), 5, cancel=("read", 40))],
    ids=["read", "cancelled"],
)
@pytest.mark.parametrize(("bits", "reused"), [(None, 32), ("8", 0)])
def test_without_sampled_tokens_reuse_ends_at_a_step(
    earlier: Request, bits: str | None, reused: int
) -> None:
    settings = {**FULL, "kv_bits": bits, "prefill_step": 32}
    result = require_alone(settings, [earlier, Request(text(400), 6)])
    expected = 64 if earlier.cancel and reused else reused
    assert result.reuse.tokens == expected


def test_a_token_that_is_evaluated_again_does_not_count_as_sampled() -> None:
    work: list[Work] = [
        Create("a", ()),
        Request(text(50), 5, session="a"),
        Change("a", "rewind", (2,)),
        Request(text(1), 0, session="a"),
        Change("a", "rewind", (1,)),
    ]
    settings = {**FULL, "prefill_step": 32}
    with Engine(MODEL, settings=settings) as engine:
        for each in work:
            each.do(engine)
        held = engine.inspect("a", "0", lambda kept: tuple(kept.live.tokens)).result()
        (result,) = Request(held + text(60, 11), 3).do(engine)
    assert result.reuse.tokens == 32
    assert result.same(answered(settings, [Request(held + text(60, 11), 3)]))


@pytest.mark.parametrize("written", [0, 5])
def test_a_saved_session_records_whether_its_last_token_was_sampled(
    tmp_path: Path, written: int
) -> None:
    settings = {**FULL, "prefill_step": 32}
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        Create("a", ()).do(engine)
        (first,) = Request(text(50), written, session="a").do(engine)
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        engine.inspect("a", "0", lambda kept: None).result()
        (result,) = Request(first.tokens + text(60, 11), 3).do(engine)
    assert result.reuse.tokens == (55 if written else 32)


def moved(session: Session) -> None:
    """Remove three tokens and insert three later: the clock is as before."""
    session.delete(20, 23)
    session.insert(50, [1, 2, 3])
    session.rewind(len(session.tokens) - 52)
    session.feed(text(150, 5))


@pytest.mark.parametrize(
    "edit",
    [lambda x: x.replace(5, 15, text(10, 11)), lambda x: x.delete(0, 5), moved],
    ids=["replace", "delete", "move"],
)
def test_a_session_that_was_edited_outside_the_engine_is_not_reused(
    edit: Callable[[Session], object], tmp_path: Path
) -> None:
    """`kvkeep chat --store` edits such sessions, and keeps the engine's notes on them."""
    settings, path = {**FULL, "prefill_step": 32}, tmp_path / "0" / "a.kvkeep"
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        Create("a", ()).do(engine)
        Request(text(200), 3, session="a").do(engine)
    snapshot = Snapshot.load(path)
    session = MODEL.restore(snapshot)
    edit(session)
    replace(session.snapshot(), notes=snapshot.notes).save(path)
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        (again,) = Request((7,), 3, session="a").do(engine)
        prompts = tuple(again.tokens)[:190] + text(9), tuple(again.tokens) + text(9)
        for prompt in prompts:
            reuse = engine.explain(prompt).result().reuse
            assert (reuse.tokens, reuse.reason) == (0, "edited")
        (result,) = Request(prompts[1], 5).do(engine)
    assert result.same(answered(settings, [Request(prompts[1], 5)]))


@pytest.mark.parametrize("step", [5, 33])
def test_odd_steps_are_not_halved_deep_in_a_prompt(step: int) -> None:
    """Halves would end elsewhere in a prompt that is prefilled from the middle on."""
    earlier = Request(text(15 * step), 0)
    longer = Request(text(15 * step) + text(3 * step, 11), 4)
    assert require_alone({**FULL, "prefill_step": step}, [earlier, longer]).reuse.tokens


def test_a_prompt_is_evaluated_in_steps_that_end_where_they_are_told_to() -> None:
    session = MODEL.session(**FULL, prefill_step=32)
    feeding = session.feeding(text(100))
    assert [feeding.step(end).tokens for end in (5, 10, 16, None, 40)] == [5, 5, 6, 16, 8]
    assert [step.tokens for step in feeding] == [24, 32, 4]
    with pytest.raises(StopIteration):
        feeding.step(5)


def test_a_prompt_that_extends_a_session_with_evicted_cells_is_evaluated_anew() -> None:
    settings = {"max_kv_size": 100, "prefill_step": 32}
    with Engine(MODEL, settings=settings) as engine:
        Create("a", ()).do(engine)
        (first,) = Request(text(150), 3, session="a").do(engine)
        request = Request(first.tokens + text(40, 11), 3)
        (result,) = request.do(engine)
        assert engine.prepare(request.prompt, "b").result() == 0
    assert (result.reuse.tokens, result.reuse.reason) == (0, "forgotten")
    assert result.same(answered(settings, [request]))


@pytest.mark.parametrize(("step", "reused"), [(128, 512), (48, 0), (512, 512), (384, 0)])
def test_a_prefix_store_hit_ends_at_a_step(tmp_path: Path, step: int, reused: int) -> None:
    settings, request = {**FULL, "prefill_step": step}, Request(text(590), 4)
    answered(settings, [request], stores=tmp_path)
    assert require_alone(settings, [request], stores=tmp_path).reuse.tokens == reused


@pytest.mark.parametrize("step", [128, 512])
def test_what_was_stored_in_other_steps_is_not_reused(tmp_path: Path, step: int) -> None:
    """Its cells differ by rounding. Nor is it lost for sessions that evaluate in these steps."""
    settings, request = {**FULL, "prefill_step": 128}, Request(text(590), 4)
    session = MODEL.session(**FULL, prefill_step=step, store=PrefixStore(tmp_path / "0"))
    session.feed(request.prompt)  # in steps that end at multiples alone
    answered({**FULL, "prefill_step": 64}, [request], stores=tmp_path)
    assert require_alone(settings, [request], stores=tmp_path).reuse.tokens == 0
    assert require_alone(settings, [request], stores=tmp_path).reuse.tokens == 512
    store = PrefixStore(tmp_path / "0")
    again = MODEL.session(**FULL, prefill_step=step, store=store).feed(request.prompt)
    assert again.reused == 512


@pytest.mark.parametrize("steps", ["128", "", None], ids=["others", "unknown", "missing"])
def test_sessions_that_were_evaluated_in_other_steps_are_not_reused(
    tmp_path: Path, steps: str | None
) -> None:
    """Files of an earlier version hold such sessions. The next turn resumes them all the same."""
    settings = {**FULL, "prefill_step": 64}
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        Create("a", ()).do(engine)
        (first,) = Request(text(300), 3, session="a").do(engine)
        engine.snapshot("a", "s").result()
    path = tmp_path / "0" / "a.kv"
    path = path if path.exists() else next((tmp_path / "0").glob("a*"))
    snapshot = Snapshot.load(path)
    engine_notes = {k: v for k, v in snapshot.notes[ENGINE_NOTES_KEY].items() if k != "steps"}
    if steps is not None:
        engine_notes["steps"] = steps
    replace(snapshot, notes={ENGINE_NOTES_KEY: engine_notes}).save(path)
    other, next_turn = Request(text(280) + text(20, 11), 3), Request(first.tokens + text(9, 11), 3)
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        Fork("a", None, "b").do(engine)  # which loads it
        (result,) = other.do(engine)
        assert (result.reuse.tokens, result.reuse.reason) == (0, "settings")
        (result,) = next_turn.do(engine)
        assert (result.reuse.tokens, result.reuse.resumed) == (303, True)
        snapshot = engine.load_snapshot("s")
        engine.restore(snapshot, name="c").result()  # one of these steps
        (result,) = replace(other, prompt=text(290) + text(20, 13)).do(engine)
        assert result.reuse.tokens == 256


def test_a_quantised_session_takes_no_unquantised_cells(tmp_path: Path) -> None:
    store, prompt = PrefixStore(tmp_path), text(500)
    MODEL.session(**FULL, prefill_step=128, store=store).feed(prompt)
    settings = {**FULL, "kv_bits": "8", "prefill_step": 128}
    assert not require_alone(settings, [Request(prompt, 4)], stores=lambda _: store).reuse.tokens


def require_alike(world: World, answers: int) -> None:
    world.run(answers)
    exact = not any(map(world.settings.get, ("kv_bits", "far_bits", "keep")))
    assert world.reused or not exact
    assert world.differing == []


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_random_generations_equal_the_request_alone(
    settings: dict[str, Any], disk: bool, tmp_path: Path
) -> None:
    """With torch, where rows of larger forward passes differ by rounding: one at a time."""
    require_alike(World(MODEL, settings, 1, tmp_path if disk else None, company=False), 10)


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("settings", SETTINGS[:8:2], ids=str)
def test_concurrent_random_generations_equal_the_request_alone(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    require_alike(World(packed_model(spec_of(32), None), settings, 2, tmp_path), 12)


@pytest.mark.slow
@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_two_thousand_random_generations_equal_the_request_alone(
    settings: dict[str, Any], seed: int, disk: bool, tmp_path: Path
) -> None:
    """Of all settings together: 60 runs of 40."""
    require_alike(
        World(packed_model(spec_of(32), 4), settings, seed, tmp_path if disk else None), 40
    )


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, "8"])
def test_random_generations_of_the_default_model_equal_the_request_alone(
    smollm2: Model, bits: str | None, tmp_path: Path
) -> None:
    settings = {"max_kv_size": 400, "prefill_step": 32, "kv_bits": bits}
    require_alike(World(smollm2, settings, 5, tmp_path), 20)


def test_an_operation_that_changed_nothing_is_no_edit() -> None:
    """Such as the compaction of a short session: its cells still serve other prompts."""
    prompt = tuple(range(1, 201))
    with Engine(MODEL, settings={"policy": "full", "max_kv_size": 1000}) as engine:
        engine.create(name="short").result()
        Request(prompt, 1, session="short").do(engine)
        engine.change("short", "0", "compact", lambda session: session.compact()).result()
        assert engine.explain((*prompt[:150], 1)).result().reuse.tokens == 128
        engine.change("short", "0", "compact", lambda session: session.compact(100)).result()
        assert engine.explain((*prompt[:150], 1)).result().reuse.tokens == 0
