"""An engine whose saves and steps fail, and its end: no other session or request suffers."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from engine.killed import CELL, MODEL, SETTINGS, new_engine, text, write
from small_models import small_model
from torch import Tensor

from kvkeep import Snapshot
from kvkeep.engine import (
    Engine,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Limits,
    PinRequest,
    SessionOperations,
    SessionRecord,
)
from kvkeep.engine.thread import EngineThread, flatten_future
from kvkeep.errors import InvalidArgument, NonFiniteLogits, OutOfMemory
from kvkeep.model import Model
from kvkeep.session.session import Session


def without_logits(model: Model, seed: int = 0) -> Session:
    """Return a session as a prompt leaves it that is cancelled after its first step."""
    session = model.session(**SETTINGS)
    next(iter(session.feeding(text(seed, 40))))
    assert 0 < len(session.tokens) < 40
    return session


@contextlib.contextmanager
def no_memory_for_logits() -> Iterator[None]:
    def fail(hidden: Tensor) -> Tensor:
        raise OutOfMemory("no memory for the logits")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODEL.decoder, "logits", fail)
        yield


def wait_until_saved(engine: Engine, record: SessionRecord) -> None:
    while record.dirty:
        engine.call(lambda: None).result(60)  # raises Cancelled if the engine has ended


def test_a_session_without_finite_logits_is_saved_without_them(tmp_path: Path) -> None:
    model = small_model()
    model.decoder.tensors["model.embed_tokens.weight"][251] = torch.nan
    session = without_logits(model)
    limits = Limits(memory=10_000 * CELL, save_idle_after=0.02)
    with Engine(model, settings=SETTINGS, limits=limits, folder=tmp_path) as engine:
        record = engine.create(name="a", session=session).result()
        wait_until_saved(engine, record)
        with pytest.raises(NonFiniteLogits):
            engine.generate(GenerationRequest((), 1), "a").text()
        tokens = record.live.tokens.tolist()
    restored = model.restore(Snapshot.load(tmp_path / "0" / "a.kvkeep"))
    assert restored.tokens == tokens
    with pytest.raises(InvalidArgument, match="feed a prompt first"):
        restored.next_token()


def test_a_save_that_fails_ends_no_engine_and_is_tried_again(tmp_path: Path) -> None:
    with new_engine(tmp_path, save_idle_after=0.02) as engine:
        with no_memory_for_logits():
            record = engine.create(name="a", session=without_logits(MODEL)).result()
            other = engine.create(name="b").result()
            with pytest.raises(OutOfMemory):
                engine.save("a").result(60)
            wait_until_saved(engine, other)
            assert record.dirty
        wait_until_saved(engine, record)
        assert len(write(engine, "a", 3)) == 3


def test_at_the_end_each_session_is_saved_that_can_be(tmp_path: Path) -> None:
    """Neither a named session nor a pinned one that fails keeps another one from its file."""
    engine = new_engine(tmp_path, save_idle_after=1e9)
    engine.create(name="failing", session=without_logits(MODEL)).result()
    engine.create(name="sound").result()
    write(engine, "sound", 2, text(1, 20))

    def add_pinned(session: Session) -> str:
        record = engine._registry.add(session, "0", named=False)
        engine._registry.pins.add(record, [PinRequest(1000)])
        return record.name

    engine.call(add_pinned, without_logits(MODEL, seed=2)).result()
    pinned = MODEL.session(**SETTINGS)
    pinned.feed(text(3, 40))
    name = engine.call(add_pinned, pinned).result()
    with no_memory_for_logits():
        engine.close()
    with new_engine(tmp_path) as engine:
        assert engine.losses == ["session 'failing' was never saved and is lost"]
        assert [record.name for record in engine.sessions().result()] == ["sound"]
        assert [pin.record.name for pin in engine.pins().result()] == [name]


def test_named_sessions_are_saved_before_pinned_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed during its end loses what can be evaluated again."""
    renamed, rename = list[str](), os.replace

    def recorded(source: str, target: str) -> None:
        renamed.append(Path(target).name)
        rename(source, target)

    engine = new_engine(tmp_path, save_idle_after=1e9)
    engine.create(name="a").result()
    write(engine, "a", 2, text(1, 20))
    # Any later change of the pin is written at the end.
    engine._files.pins._next_check = float("inf")  # type: ignore[union-attr]
    pinned = GenerationRequest(text(2, 40), 1, pins=(PinRequest(1000),))
    engine.generate(pinned).text()
    monkeypatch.setattr(os, "replace", recorded)
    engine.close()
    files = [name for name in renamed if name.endswith(".kvkeep")]
    assert files[0] == "a.kvkeep"
    assert len(files) == 2
    assert renamed[-1] == "pins.json"


@pytest.mark.parametrize("grace", [0, 60])
def test_a_request_that_is_accepted_during_the_last_step_ends(grace: float) -> None:
    """It is finished within the grace, and cancelled after it."""
    events = list[GenerationEvent]()
    engine = new_engine()
    closing = threading.Thread(target=engine.close, args=(grace,))

    def submit_and_close(event: GenerationEvent) -> None:
        if isinstance(event, Finished):
            late = GenerationRequest(text(1, 20), 2, ignore_eos=True)
            engine.submit(late, listener=events.append)
            closing.start()
            assert engine._thread.closing.wait(60)

    engine.submit(GenerationRequest(text(0, 20), 2), listener=submit_and_close).result()
    closing_began = engine._thread.closing.wait(60)
    assert closing_began
    closing.join(60)
    assert not closing.is_alive()
    assert isinstance(events[-1], Finished if grace else Failed)


def test_a_step_that_fails_ends_no_engine_thread() -> None:
    steps, ends = list[int](), list[int]()

    def step() -> bool:
        steps.append(1)
        raise RuntimeError("a defect of the engine")

    thread = EngineThread(step, 60, lambda: ends.append(1))
    thread.start()
    assert thread.submit_long(lambda: (thread.take_turn(), "done")[1]).result(60) == "done"
    assert thread.submit(lambda: 1).result(60) == 1
    thread.close()
    assert steps
    assert ends == [1]


def test_calls_that_never_cease_delay_no_step() -> None:
    """Such calls are requests that are refused for lack of memory, and sent again at once."""
    steps, steps_seen, done = list[int](), list[int](), threading.Event()

    def call() -> None:
        steps_seen.append(len(steps))
        if len(steps_seen) < 20:
            thread.submit(call)
        else:
            done.set()

    def step() -> bool:
        steps.append(1)
        return False

    thread = EngineThread(step, 60, lambda: None)
    thread.submit(call)
    thread.start()
    assert done.wait(60)
    thread.close()
    assert steps_seen[-1] >= 19


@pytest.mark.parametrize("remove", [Engine.discard, Engine.remove_name], ids=lambda f: f.__name__)
def test_a_session_without_a_name_is_removed_before_its_first_step(
    remove: Callable[[Engine, str], Future[None]],
) -> None:
    with new_engine() as engine:

        def admit_and_remove(_: SessionOperations) -> Future[None]:
            request = GenerationRequest(text(0, 40), 1)
            (generation,) = engine._admission.admit(request, None, "0", [None])
            removed = remove(engine, generation.record.name)
            engine.yield_turn()  # runs the call, and then a step
            return removed

        engine.run_in_steps(admit_and_remove).result().result(60)
        assert engine.sessions(unnamed=True).result() == []
        assert engine.totals().result().running == 0


@pytest.mark.parametrize("cancelled", ["result", "outer", "inner"])
def test_a_cancelled_result_is_cancelled_and_reports_no_error(
    cancelled: str, caplog: pytest.LogCaptureFixture
) -> None:
    outer, inner = Future[Future[int]](), Future[int]()
    result = flatten_future(outer)
    if cancelled == "outer":
        outer.cancel()
        outer.set_running_or_notify_cancel()
    else:
        (result if cancelled == "result" else inner).cancel()
        outer.set_result(inner)
        if inner.set_running_or_notify_cancel():
            inner.set_result(1)
    assert result.cancelled()
    assert not caplog.records


def test_a_save_goes_on_when_its_caller_is_gone(tmp_path: Path) -> None:
    with new_engine(tmp_path, save_idle_after=1e9) as engine:
        record, may_write = engine.create(name="a").result(), threading.Event()
        engine._registry.disk.writer.submit(may_write.wait)
        saving = engine.call(engine.begin_save, record).result()
        is_cancelled = saving.cancel()
        may_write.set()
        assert not is_cancelled
        assert saving.result(60) == record.revision
