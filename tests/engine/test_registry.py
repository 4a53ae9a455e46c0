"""Sessions of an engine: memory limit, owners, names, refused requests and changes."""

import random
import time
from pathlib import Path

import psutil
import pytest
from engine.killed import (
    CELL,
    DRAWN,
    MODEL,
    new_engine,
    text,
    write,
)
from full_disk import small_files_only

from kvkeep.engine import (
    Engine,
    GenerationRequest,
    Limits,
    SessionRecord,
    SessionRequest,
)
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.errors import (
    Busy,
    Cancelled,
    ContextFull,
    InvalidArgument,
    NoRoom,
    NoSuchSession,
    StoreError,
    WrongRevision,
)


def _token_ids(record: SessionRecord) -> list[int]:
    return record.live.tokens.tolist()


def in_memory(engine: Engine) -> set[str]:
    return {record.name for record in engine.sessions().result() if record.session is not None}


def test_the_least_recently_used_session_is_evicted_and_a_pinned_one_never(tmp_path: Path) -> None:
    with new_engine(tmp_path, cells=270) as engine:
        for name in "abc":
            engine.create(name=name).result()
            write(engine, name, 1, text(0, 60))
        engine.set_resident("a", "0", True).result()
        engine.create(name="d").result()
        write(engine, "d", 1, text(1, 60))
        assert in_memory(engine) == {"a", "c", "d"}
        write(engine, "b", 1)
        assert in_memory(engine) == {"a", "b", "d"}


def test_a_session_stays_on_disk_that_is_saved_there_or_has_no_room(tmp_path: Path) -> None:
    with new_engine(tmp_path, cells=270) as engine:
        for name in "abcd":
            engine.create(name=name).result()
            write(engine, name, 1, text(0, 60))
        held = in_memory(engine)
        assert "a" not in held
        engine.save("a").result()
        assert in_memory(engine) == held
        with small_files_only(), pytest.raises(StoreError):  # none of the others can be evicted
            engine.inspect("a", "0", _token_ids).result()
        assert in_memory(engine) == held
        assert engine.inspect("a", "0", _token_ids).result()[:60] == list(text(0, 60))


def test_cells_stay_within_the_memory_limit(tmp_path: Path) -> None:
    draw, names = random.Random(3), "abcdefgh"
    with new_engine(tmp_path, cells=250) as engine:
        for name in names:
            engine.create(name=name).result()
        for _ in range(60):
            write(engine, draw.choice(names), draw.randrange(1, 20), text(draw.randrange(9), 30))
            held = engine.totals().result().nbytes
            assert held <= 250 * CELL


def test_without_room_a_request_is_refused_and_nothing_is_left_behind() -> None:
    with new_engine(cells=250) as engine:
        busy = [
            engine.generate(GenerationRequest(text(at, 40), 10_000, ignore_eos=True))
            for at in range(2)
        ]
        with pytest.raises(NoRoom) as refused:
            engine.generate(GenerationRequest(text(5, 40), 10_000, ignore_eos=True))
        assert 1 <= refused.value.retry_after < 60
        for generation in busy:
            generation.cancel()
        while engine.totals().result().running:
            time.sleep(0.01)
        assert len(list(engine.generate(GenerationRequest(text(5, 40), 3, ignore_eos=True)))) > 3


def test_a_refused_request_that_depends_on_the_session_does_not_change_it() -> None:
    """Such as the continuation of an answer, which removes the answer's end token first."""

    def make(record: SessionRecord) -> GenerationRequest:
        record.live.rewind(1)
        return GenerationRequest((), 400)

    settings = {"max_kv_size": 512, "prefill_step": 16}
    other = MODEL.session(**settings)
    other.feed(text(1, 400))
    small, large = (max_session_bytes(MODEL.session(**settings), count) for count in (8, 408))
    assert small < large
    limits = Limits(memory=other.nbytes + small)
    with Engine(MODEL, settings=settings, limits=limits) as engine:
        engine.create(name="other", session=other).result()
        engine.create(name="chat").result()
        engine.generate(GenerationRequest(text(0, 8), 0), "chat").text()
        before = engine.inspect("chat", "0", _token_ids).result()
        with pytest.raises(NoRoom):
            engine.generate(SessionRequest(make, lambda _: 400), "chat")
        assert engine.inspect("chat", "0", _token_ids).result() == before


@pytest.mark.parametrize("prompt", [text(0, 8) + text(2, 30), text(2, 30), (*text(0, 8), 5, 6)])
def test_a_refused_prompt_that_is_the_whole_text_does_not_change_its_session(
    prompt: tuple[int, ...],
) -> None:
    """Neither one that continues its text nor one that differs; and it leaves no new session."""
    settings = {"max_kv_size": 512, "prefill_step": 16}
    other = MODEL.session(**settings)
    other.feed(text(1, 400))
    small, large = (max_session_bytes(MODEL.session(**settings), count) for count in (20, 420))
    limits = Limits(memory=other.nbytes + 2 * small)
    assert other.nbytes + large > limits.memory
    with Engine(MODEL, settings=settings, limits=limits) as engine:
        engine.create(name="other", session=other).result()
        engine.create(name="chat").result()
        engine.generate(GenerationRequest(text(0, 8), 4, ignore_eos=True), "chat").text()
        before = engine.inspect("chat", "0", lambda r: (r.revision, r.live.tokens.tolist()))
        for name in ("chat", "new"):
            with pytest.raises(NoRoom):
                engine.generate(GenerationRequest(prompt, 400, whole_text=True), name)
        after = engine.inspect("chat", "0", lambda r: (r.revision, r.live.tokens.tolist()))
        assert after.result() == before.result()
        assert {record.name for record in engine.sessions().result()} == {"other", "chat"}


@pytest.mark.parametrize("continues", [False, True])
def test_a_whole_text_that_its_policy_cannot_hold_does_not_change_its_session(
    continues: bool,
) -> None:
    settings = {"max_kv_size": 64, "prefill_step": 16, "policy": "full"}
    with Engine(MODEL, settings=settings) as engine:
        engine.create(name="chat").result()
        engine.generate(GenerationRequest(text(0, 8), 4, ignore_eos=True), "chat").text()
        before = engine.inspect("chat", "0", lambda r: (r.revision, r.live.tokens.tolist()))
        own = tuple(before.result()[1]) if continues else text(2, 30)
        for name in ("chat", "new"):
            with pytest.raises(ContextFull):
                engine.generate(GenerationRequest(own + text(3, 100), 1, whole_text=True), name)
        after = engine.inspect("chat", "0", lambda r: (r.revision, r.live.tokens.tolist()))
        assert after.result() == before.result()
        assert [record.name for record in engine.sessions().result()] == ["chat"]


def test_a_request_that_can_never_fit_is_refused_without_a_retry() -> None:
    with new_engine(cells=50) as engine, pytest.raises(NoRoom) as refused:
        engine.generate(GenerationRequest(text(0, 40), 1000))
    assert refused.value.retry_after == float("inf")


def test_one_owner_sees_nothing_of_another(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create("one", "mine").result()
        engine.generate(GenerationRequest(text(0, 50), 1), "mine", "one").text()
        with pytest.raises(NoSuchSession):
            engine.generate(GenerationRequest((), 1), "mine", "two")
        with pytest.raises(NoSuchSession):
            engine.delete("mine", "two").result()
        assert engine.sessions("two").result() == []
        prompt = text(7, 50)
        engine.generate(GenerationRequest(prompt, 1), owner="one").text()
        assert engine.generate(GenerationRequest(prompt, 1), owner="two").reuse.tokens == 0
        assert engine.generate(GenerationRequest(prompt, 1), owner="one").reuse.tokens == 48


@pytest.mark.parametrize("owner", ["", "../x", "A", "a" * 65])
def test_an_owner_cannot_be_a_path(tmp_path: Path, owner: str) -> None:
    with new_engine(tmp_path) as engine, pytest.raises(InvalidArgument, match="owner"):
        engine.create(owner, "name").result()


def test_a_busy_session_refuses_changes(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        generation = engine.generate(GenerationRequest(text(0, 20), 10**6, ignore_eos=True), "a")
        for change in (
            lambda: engine.generate(GenerationRequest((), 1), "a"),
            lambda: engine.delete("a").result(),
            lambda: engine.change("a", "0", "rewind", lambda session: session.rewind(1)).result(),
        ):
            with pytest.raises(Busy):
                change()
        generation.cancel()


def test_a_change_for_another_revision_is_refused(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        record = engine.create(name="a").result()
        write(engine, "a", 2, text(0, 20))
        revision = engine.inspect("a", "0", lambda record: record.revision).result()
        with pytest.raises(WrongRevision):
            engine.delete("a", revision=revision - 1).result()
        engine.change("a", "0", "rewind", lambda session: session.rewind(1), revision).result()
        assert record.revision == revision + 1


def test_a_session_without_its_name_serves_the_next_prompt_and_has_no_file(tmp_path: Path) -> None:
    prompt = tuple(text(3, 60))
    with new_engine(tmp_path, cells=500) as engine:
        engine.create(name="a").result()
        engine.generate(GenerationRequest(prompt, 4), "a").text()
        engine.save("a").result()
        held = _token_ids(engine.find("a").result())
        engine.remove_name("a").result()
        assert engine.sessions().result() == []
        (unnamed,) = engine.sessions(unnamed=True).result()
        assert _token_ids(unnamed) == held
        generation = engine.generate(GenerationRequest((*held, 1, 2), 1))
        generation.text()
        assert generation.reuse.tokens == len(held)
    assert not list(tmp_path.rglob("a.*"))
    with new_engine(tmp_path) as engine:
        assert engine.sessions().result() == []


def test_a_running_session_that_loses_its_name_ends(tmp_path: Path) -> None:
    with new_engine(tmp_path, cells=500) as engine:
        engine.create(name="a").result()
        generation = engine.generate(GenerationRequest(text(3, 60), 10_000, ignore_eos=True), "a")
        next(generation)
        engine.remove_name("a").result()
        with pytest.raises(Cancelled):
            generation.text()
        with pytest.raises(NoSuchSession):
            engine.find("a").result()


def test_a_session_name_is_unique(tmp_path: Path) -> None:
    with new_engine(tmp_path) as one:
        one.create(name="a").result()
        with pytest.raises(InvalidArgument, match="already"):
            one.create(name="a").result()


@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_many_generations_do_not_grow_memory(count: int) -> None:
    with new_engine(cells=1000) as engine:

        def some(seed: int) -> int:
            for at in range(count):
                engine.generate(
                    GenerationRequest(text(seed + at, 30), 2, DRAWN, ignore_eos=True)
                ).text()
            return int(psutil.Process().memory_info().rss)

        some(0)
        before = some(1000)
        assert some(2000) - before < 8_000_000 * count / 150
        assert engine.totals().result().nbytes <= 1000 * CELL


def test_a_prompt_over_the_limit_is_refused() -> None:
    with new_engine(prompt_tokens=100) as engine:
        with pytest.raises(InvalidArgument, match="at most 100 tokens"):
            engine.generate(GenerationRequest(text(0, 101), 1))
        assert engine.generate(GenerationRequest(text(0, 100), 1)).text() is not None


def test_the_former_names_of_resident_are_deprecated_aliases(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        with pytest.warns(DeprecationWarning, match="use Engine.set_resident"):
            record = engine.pin("a", "0", True).result()
        with pytest.warns(DeprecationWarning, match="use SessionRecord.resident"):
            assert record.pinned is record.resident is True
