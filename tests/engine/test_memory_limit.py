"""Sessions that share cells or cannot be saved, within an engine's memory limit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine.killed import CELL, MODEL, SETTINGS, new_engine, text, write
from full_disk import small_files_only

from kvkeep.engine import (
    Engine,
    GenerationRequest,
    Limits,
    PinRequest,
    SessionRequest,
    registry,
)
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.request import RequestLike
from kvkeep.errors import NoRoom, StoreError
from kvkeep.session.memory import Memory, memory_bytes
from kvkeep.session.sampling import Sampling


def in_memory(engine: Engine) -> set[str]:
    return {record.name for record in engine.sessions().result() if record.session is not None}


def test_cells_that_idle_forks_hold_leave_no_room_for_others() -> None:
    """A ring that is continued is no longer shared; its forks hold the cells that were."""
    needed = max_session_bytes(MODEL.session(**SETTINGS), None)
    with new_engine(cells=2 * needed // CELL + 10) as engine:
        engine.create(name="a").result()
        write(engine, "a", 1, text(0, 100))
        for number in range(6):
            engine.fork("a", new_name=f"fork{number}").result()
        running = engine.generate(GenerationRequest((), 10_000, ignore_eos=True), "a")
        with pytest.raises(NoRoom):
            engine.generate(GenerationRequest((), 10_000, ignore_eos=True), "fork0")
        totals = engine.totals().result()
        assert totals.nbytes <= totals.memory_limit
        running.cancel()


def test_a_session_that_cannot_be_saved_stays_and_the_next_one_is_evicted(tmp_path: Path) -> None:
    with new_engine(tmp_path, cells=200, save_idle_after=1e9) as engine:
        for seed, name in enumerate(("changed", "saved")):
            engine.create(name=name).result()
            write(engine, name, 1, text(seed, 100))
        engine.save("saved").result()
        with small_files_only(1):
            engine.generate(GenerationRequest(text(2, 100), 1, ignore_eos=True)).text()
            assert in_memory(engine) == {"changed"}
        assert engine.find("changed").result().dirty


def test_a_session_that_cannot_be_saved_keeps_its_pins(tmp_path: Path) -> None:
    prompt = GenerationRequest(text(0, 100), 1, ignore_eos=True, pins=(PinRequest(1000),))
    other = GenerationRequest(text(1, 100), 1, ignore_eos=True)
    with new_engine(tmp_path, cells=140, save_idle_after=1e9) as engine:
        engine.create(name="pinned").result()
        engine.generate(prompt, "pinned").text()
        with small_files_only(1), pytest.raises(StoreError, match="Free some space"):
            engine.generate(other)
        assert [pin.record.name for pin in engine.pins().result()] == ["pinned"]
        assert engine.totals().result().evicted_pins == 0
        engine.generate(other).text()
        assert engine.totals().result().evicted_pins == 1


def test_many_sessions_are_evicted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of all sessions are not summed again for each session that is evicted."""
    sums, evicted, evict = list[int](), list[SessionRecord](), SessionRegistry.evict

    def counted_bytes(memories: Sequence[Memory]) -> int:
        sums.append(memory_bytes(memories))
        return sums[-1]

    def counted_evict(self: SessionRegistry, record: SessionRecord) -> None:
        evicted.append(record)
        evict(self, record)

    monkeypatch.setattr(registry, "memory_bytes", counted_bytes)
    monkeypatch.setattr(SessionRegistry, "evict", counted_evict)
    with new_engine(cells=2_500) as engine:
        for seed in range(30):
            engine.generate(GenerationRequest(text(seed, 60), 1, ignore_eos=True)).text()
        sums.clear()
        request = GenerationRequest(text(30, 60), 1, ignore_eos=True)
        engine.submit_many(request, [Sampling()] * 20).result()
        assert len(evicted) > 10
        assert len(sums) < 10


def fill(engine: Engine, seeds: Sequence[int], *pins: PinRequest) -> None:
    """Leave an idle session without a name for each seed."""
    for seed in seeds:
        request = GenerationRequest(text(seed, 48), 1, ignore_eos=True, pins=pins)
        engine.generate(request).text()


def all_in_memory(engine: Engine) -> set[str]:
    records = engine.sessions(unnamed=True).result()
    return {record.name for record in records if record.session is not None}


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_that_has_no_room_evicts_nothing(count: int) -> None:
    """The sessions that it would reuse stay, and so do the pins of others."""
    endless = GenerationRequest(text(9, 10), 100_000, ignore_eos=True)
    with new_engine(cells=350) as engine:
        fill(engine, [0], PinRequest(1000))
        running = [engine.generate(endless) for _ in range(3)]
        before = all_in_memory(engine)
        request = GenerationRequest(text(0, 48), 100_000, ignore_eos=True)
        with pytest.raises(NoRoom, match="not enough memory"):
            engine.submit_many(request, [Sampling()] * count).result()
        assert all_in_memory(engine) == before
        assert engine.totals().result().evicted_pins == 0
        for generation in running:
            generation.cancel()


def test_a_session_on_disk_that_has_no_room_evicts_nothing(tmp_path: Path) -> None:
    endless = GenerationRequest(text(9, 10), 100_000, ignore_eos=True)
    with new_engine(tmp_path) as engine:
        engine.create(name="saved").result()
        write(engine, "saved", 1, text(0, 30))
    with new_engine(tmp_path, cells=350) as engine:
        fill(engine, [1])
        running = [engine.generate(endless) for _ in range(3)]
        before = all_in_memory(engine)
        assert len(before) == 4
        for _ in range(2):
            with pytest.raises(NoRoom, match="not enough memory"):
                engine.generate(endless, "saved")
            assert all_in_memory(engine) == before
        assert engine.find("saved").result().session is None
        for generation in running:
            generation.cancel()


@pytest.mark.parametrize("depends_on_session", [False, True])
def test_a_session_on_disk_is_not_read_for_a_request_without_room(
    tmp_path: Path, depends_on_session: bool
) -> None:
    """Although there is room for the session itself, once an idle one is evicted."""
    endless = GenerationRequest(text(9, 10), 100_000, ignore_eos=True)
    refused: RequestLike = endless
    if depends_on_session:
        refused = SessionRequest(lambda _: endless, lambda r: 100_010 if r.has_tokens else 0)
    settings = {"max_kv_size": 512, "prefill_step": 16}
    with Engine(MODEL, settings=settings, folder=tmp_path) as engine:
        engine.create(name="saved").result()
        write(engine, "saved", 1, text(0, 30))
    limits = Limits(memory=910 * CELL)
    with Engine(MODEL, settings=settings, folder=tmp_path, limits=limits) as engine:
        fill(engine, [1])
        running = engine.generate(endless)
        before = all_in_memory(engine)
        assert len(before) == 2
        with pytest.raises(NoRoom, match="not enough memory"):
            engine.generate(refused, "saved")
        assert all_in_memory(engine) == before
        running.cancel()


@pytest.mark.parametrize("pinned", [False, True])
def test_the_session_that_a_prompt_reuses_is_evicted_last(pinned: bool) -> None:
    """It comes after others that were used later, but before those that are pinned."""
    pins = (PinRequest(1000),) if pinned else ()
    with new_engine(cells=180) as engine:
        fill(engine, [0])
        fill(engine, [1], *pins)
        assert len(all_in_memory(engine)) == 2
        request = GenerationRequest((*text(0, 48), *text(2, 5)), 1, ignore_eos=True)
        generation = engine.generate(request)
        assert generation.reuse.tokens == 48
        generation.text()
        kept = [r for r in engine.sessions(unnamed=True).result() if r is not generation.record]
        assert [record.live.tokens[0] for record in kept] == [text(1 if pinned else 0, 1)[0]]
