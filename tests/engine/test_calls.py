"""Calls and generations of an engine that is closing, and listeners of generations."""

import contextlib
import math
import threading
from pathlib import Path

import pytest
from engine.killed import (
    DRAWN,
    new_engine,
    text,
    write,
)

from kvkeep.engine import (
    Finished,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
)
from kvkeep.engine.thread import EngineThread
from kvkeep.errors import (
    Cancelled,
    NoRoom,
)


def test_each_answer_of_a_request_counts_as_a_generation() -> None:
    long = GenerationRequest(text(0, 20), 1_000, ignore_eos=True)
    with new_engine(running=4, running_per_owner=3) as engine:
        with pytest.raises(NoRoom, match="4 generations, and at most 3") as refused:
            engine.submit_many(long, [DRAWN] * 4).result()
        assert refused.value.retry_after == math.inf
        generations = engine.submit_many(long, [DRAWN] * 2).result()
        for owner, samplings in (("0", [DRAWN] * 2), ("1", [DRAWN] * 3)):
            with pytest.raises(NoRoom, match="2 generations are running") as refused:
                engine.submit_many(long, samplings, owner).result()
            assert refused.value.retry_after < math.inf
        generations += engine.submit_many(long, [DRAWN] * 2, "1").result()
        assert engine.totals().result().running == 4
        for generation in generations:
            generation.cancel()


def test_calls_to_a_closing_engine_are_cancelled(tmp_path: Path) -> None:
    engine, answers = new_engine(tmp_path), list[object]()

    def ask() -> None:
        while True:
            try:
                engine.call(lambda: None).result()
            except Cancelled as error:
                answers.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join()
    assert len(answers) == 8


def test_a_failing_listener_ends_no_other_generation() -> None:
    """Such as one whose event loop has closed: without a guard the engine's thread died of it."""
    reports: list[str] = []

    def fail(operation: object) -> None:
        raise RuntimeError("Event loop is closed")

    with new_engine() as engine:
        stop = engine.watch(fail)
        engine.watch(lambda operation: reports.append(operation.what))
        engine.create(name="a").result(60)
        assert write(engine, "a", 3, text(0, 20))
        stop()
    assert reports == ["create", "generate"]


def test_a_generation_with_a_listener_yields_nothing() -> None:
    with new_engine() as engine:
        ended, events = threading.Event(), list[object]()

        def listen(event: GenerationEvent) -> None:
            events.append(event)
            if isinstance(event, Finished):
                ended.set()

        request = GenerationRequest(text(0, 20), 2, ignore_eos=True)
        (generation,) = engine.submit(request, listener=listen).result()
        assert list(generation) == []
        assert ended.wait(60)
        assert len([event for event in events if isinstance(event, GeneratedToken)]) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_are_cancelled_once_the_engine_thread_has_ended_by_itself() -> None:
    def step() -> bool:
        raise SystemExit

    thread = EngineThread(step, 60, lambda: None)
    thread.start()
    futures = [thread.submit(lambda: None) for _ in range(3)]
    for future in futures:
        with contextlib.suppress(Cancelled):
            future.result(60)
    thread.close()
    with pytest.raises(Cancelled):
        thread.submit(lambda: None).result(60)
