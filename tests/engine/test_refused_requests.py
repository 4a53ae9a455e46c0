"""Requests that are refused for lack of memory: what they read, copy and record."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.killed import new_engine, text, write

from kvkeep.engine import Engine, Generation, GenerationRequest, PinRequest, session_disk
from kvkeep.engine.session_disk import SessionDisk
from kvkeep.errors import Cancelled, InvalidArgument, NoRoom
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

ENDLESS = GenerationRequest(text(9, 10), 100_000, ignore_eos=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a session was read from its file, and how often cells were copied."""
    counts = Counter[str]()

    def count(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(SessionDisk, "restored")
    count(Session, "beginning")
    return counts


@contextmanager
def running(engine: Engine, count: int) -> Iterator[list[Generation]]:
    """Generations that end with the block."""
    generations = [engine.generate(ENDLESS, owner="busy") for _ in range(count)]
    try:
        yield generations
    finally:
        for generation in generations:
            generation.cancel()
            with pytest.raises(Cancelled):
                generation.text()


def test_a_refused_prompt_copies_no_cells_and_is_recorded_nowhere(calls: Counter[str]) -> None:
    prompt = GenerationRequest(text(0, 48), 1, ignore_eos=True, pins=(PinRequest(1000, 32),))
    with new_engine(cells=350) as engine:
        engine.generate(prompt).text()
        (miss,), (pin,) = engine.cache_misses().result(), engine.pins().result()
        longer = GenerationRequest((*text(0, 48), *text(1, 5)), 1, ignore_eos=True)
        with running(engine, 3):
            for _ in range(3):
                with pytest.raises(NoRoom, match="not enough memory"):
                    engine.generate(longer)
            assert engine.cache_misses().result() == [miss]
            assert engine.pins().result() == [pin]
            assert not calls["beginning"]
        generation = engine.generate(longer)
        assert generation.reuse.tokens == 48
        (extended,) = engine.pins().result()
        assert extended.hits == 1
        assert calls.total() == 1
        assert [report.reuse.tokens for report in engine.cache_misses().result()] == [48, 0]
        generation.text()


@pytest.mark.parametrize("whole_text", [False, True])
def test_a_session_that_has_no_room_is_not_read_again_and_again(
    tmp_path: Path, calls: Counter[str], whole_text: bool
) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="saved").result()
        write(engine, "saved", 1, text(0, 30))
    prompt = (*text(0, 30), *text(1, 20)) if whole_text else ()
    request = GenerationRequest(prompt, 100_000, ignore_eos=True, whole_text=whole_text)
    with new_engine(tmp_path, cells=350) as engine:
        with running(engine, 3):
            for _ in range(5):
                with pytest.raises(NoRoom, match="not enough memory"):
                    engine.generate(request, "saved")
            assert not calls["restored"]
            assert engine.find("saved").result().session is None
        engine.generate(request, "saved").cancel()
        assert calls["restored"] == 1


def test_errors_that_waiting_does_not_mend_come_before_a_lack_of_memory(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="saved").result()
        write(engine, "saved", 1, text(0, 30))
    other_vocabulary = Sampling(logit_bias=((10**6, 1.0),))
    with new_engine(tmp_path, cells=350) as engine, running(engine, 3):
        for session in (None, "saved"):
            with pytest.raises(InvalidArgument, match="logit_bias must be"):
                engine.generate(GenerationRequest(text(0, 10), 10_000, other_vocabulary), session)


def test_a_session_whose_header_is_wrong_is_reported_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="saved").result()
        write(engine, "saved", 1, text(0, 30))

    def with_unknown_bits(path: Path) -> dict[str, Any]:
        return {**read_snapshot_document(path), "bits": {"other": 3}}

    monkeypatch.setattr(session_disk, "read_snapshot_document", with_unknown_bits)
    with new_engine(tmp_path) as engine:
        assert engine.find("saved").result().bound is None
        assert engine.inspect("saved", "0", lambda record: len(record.live.tokens)).result() == 31
