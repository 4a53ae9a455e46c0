"""An engine's sessions: memory limit, owners, saves, and recovery after a kill."""

import contextlib
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine.killed import (
    CELL,
    COMPACTED,
    DRAWN,
    MODEL,
    SETTINGS,
    compact_and_save,
    killed_after,
    killed_at,
    leave_something_unsaved,
    new_engine,
    save_over_and_over,
    text,
    write,
)
from full_disk import small_files_only

from kvkeep import Snapshot
from kvkeep.engine import (
    Engine,
    Finished,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
    Limits,
    SessionRecord,
    SessionRequest,
)
from kvkeep.engine.record import max_session_bytes
from kvkeep.engine.session_files import ENGINE_NOTES_KEY
from kvkeep.engine.thread import EngineThread
from kvkeep.errors import (
    Busy,
    Cancelled,
    ContextFull,
    InvalidArgument,
    Locked,
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


def test_idle_sessions_are_saved(tmp_path: Path) -> None:
    with new_engine(tmp_path, save_idle_after=0.05) as engine:
        record = engine.create(name="a").result()
        written = write(engine, "a", 9, text(0, 20))
        while record.dirty:
            time.sleep(0.01)
    with new_engine(tmp_path) as engine:
        assert engine.losses == []
        session = MODEL.session(**SETTINGS)
        session.feed(text(0, 20))
        assert [session.next_token(DRAWN) for _ in range(9)] == written
        assert write(engine, "a", 9) == [session.next_token(DRAWN) for _ in range(9)]


def test_a_session_that_is_read_again_and_again_is_saved(tmp_path: Path) -> None:
    with new_engine(tmp_path, save_idle_after=0.5) as engine:
        record = engine.create(name="a").result()
        while record.dirty:
            engine.use("a").result()
            time.sleep(0.01)


def test_close_saves_unsaved_sessions(tmp_path: Path) -> None:
    with new_engine(tmp_path, save_idle_after=1e9) as engine:
        engine.create(name="a").result()
        write(engine, "a", 9, text(0, 20))
        revision = engine.sessions().result()[0].revision
    with new_engine(tmp_path) as engine:
        assert engine.losses == []
        assert engine.sessions().result()[0].revision == revision


@contextlib.contextmanager
def first_rename_delayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold back the first rename of a saved file until the block ends, or for 2 seconds."""
    begun, release, rename = threading.Event(), threading.Event(), os.replace

    def delayed(source: str, target: str) -> None:
        if str(target).endswith(".kvkeep") and not begun.is_set():
            begun.set()
            release.wait(2)
        rename(source, target)

    monkeypatch.setattr(os, "replace", delayed)
    yield begun
    release.set()


@pytest.mark.parametrize("recreated", [False, True])
def test_an_eviction_during_a_save_leaves_the_newer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recreated: bool
) -> None:
    """The save in progress is of an older revision, or of a deleted session of the same name."""
    with new_engine(tmp_path, cells=150, save_idle_after=1e9) as engine:
        engine.create(name="a").result()
        write(engine, "a", 2, text(0, 60))
        with first_rename_delayed(monkeypatch) as begun:
            saved = engine.save("a")
            assert begun.wait(60)
            if recreated:
                engine.delete("a").result()
                engine.create(name="a").result()
            write(engine, "a", 3, text(1, 20))
            expected = engine.inspect("a", "0", _token_ids).result()
            engine.create(name="b").result()
            write(engine, "b", 1, text(1, 120))  # evicts "a"
        with contextlib.suppress(Cancelled):
            saved.result()
        assert engine.inspect("a", "0", _token_ids).result() == expected


def test_a_session_deleted_during_a_save_leaves_no_file(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        for _ in range(20):
            engine.create(name="a").result()
            write(engine, "a", 1, text(0, 60))
            saved = engine.save("a")
            engine.delete("a").result()
            with contextlib.suppress(NoSuchSession):
                saved.result()
    assert [path.name for path in (tmp_path / "0").iterdir()] == []


def test_a_save_of_a_deleted_session_leaves_the_marker_of_a_new_one(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        writes, marker = threading.Event(), tmp_path / "0" / "a.unsaved"
        engine.create(name="a").result()
        write(engine, "a", 1, text(0, 60))
        engine._registry.disk.writer.submit(writes.wait)
        saved = engine.save("a")
        engine.delete("a").result()
        assert not marker.exists()
        engine.create(name="a").result()
        assert marker.exists()
        writes.set()
        saved.result()
        engine.sessions().result()  # the engine's thread has noted the save
        assert marker.exists()


def test_a_change_that_changes_nothing_leaves_the_revision(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a", policy="full").result()
        write(engine, "a", 1, text(0, 40))
        engine.save("a").result()
        before, operations = engine.find("a").result().revision, engine.operations().result()
        for change in (lambda s: s.rewind(0), lambda s: s.compact(60), lambda s: list(s.tokens)):
            engine.change("a", "0", "rewind", change).result()
            engine.change_in_steps("a", "0", "compact", change, notes={}).result()
        assert engine.find("a").result().revision == before
        assert engine.operations().result() == operations
        assert not engine.find("a").result().dirty
        engine.change("a", "0", "align", lambda s: s.rewind(0), notes={"key": 1}).result()
        assert engine.find("a").result().revision == before + 1
        assert engine.find("a").result().first_edit == ""


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


@pytest.mark.parametrize(
    "moment",
    [pytest.param(x, marks=() if x in (0, 4, 11) else pytest.mark.slow) for x in range(12)],
)
def test_an_acknowledged_save_survives_a_kill_to_the_bit(tmp_path: Path, moment: int) -> None:
    """The session generates and is saved, over and over, and reports each acknowledged save."""
    acknowledged = killed_after(tmp_path, save_over_and_over, 0.013 * moment)[-1][1]
    session = MODEL.session(**SETTINGS)
    session.feed(text(0, 40))
    with new_engine(tmp_path) as engine:
        held = engine.inspect("a", "0", _token_ids).result()
        assert len(held) >= acknowledged
        while len(session.tokens) < len(held):
            session.next_token(DRAWN)
        assert session.tokens == held
        assert write(engine, "a", 20) == [session.next_token(DRAWN) for _ in range(20)]


@pytest.mark.extended
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_acknowledged_work_survives_a_kill_at_any_change_of_the_disk(
    tmp_path: Path, every: int
) -> None:
    """It continues to the bit; no other session is there in part."""
    session = MODEL.session(**SETTINGS)
    session.feed(text(0, 40))
    expected = [*text(0, 40), *(session.next_token(DRAWN) for _ in range(60))]
    moment = 0
    while (reports := killed_at(folder := tmp_path / str(moment), moment)) is not None:
        acknowledged = dict(reports)
        with new_engine(folder) as engine:
            if "snapshot" in acknowledged:
                engine.restore("s", name="snapshot").result()
            names = {record.name for record in engine.sessions().result()}
            assert {name for name, count in acknowledged.items() if count} - {"b"} <= names
            for name in names:
                held = engine.inspect(name, "0", _token_ids).result()
                assert len(held) >= acknowledged.get(name, 0)
                assert held == expected[: len(held)]
                if len(held) > 40:
                    assert write(engine, name, 5) == expected[len(held) : len(held) + 5]
        moment += every
    assert moment > 40


@pytest.mark.extended
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_compaction_survives_a_kill_at_any_change_of_the_disk(tmp_path: Path, every: int) -> None:
    """The session is as it was before or after one of its compactions, and continues to the bit."""
    session = MODEL.session(**{**SETTINGS, **COMPACTED})
    session.feed(text(0, 200))
    saved = dict[int, list[int]]()  # the tokens that follow each saved state, by its length
    for count in (3, 40, 40):
        if saved:
            session.compact(120)
        for _ in range(count):
            session.next_token(DRAWN)
        fork = session.fork()
        saved[len(session.tokens)] = [fork.next_token(DRAWN) for _ in range(5)]
    moment = 0
    while (
        reports := killed_at(folder := tmp_path / str(moment), moment, compact_and_save)
    ) is not None:
        acknowledged = dict(reports)
        with new_engine(folder) as engine:
            names = {record.name for record in engine.sessions().result()}
            assert acknowledged.keys() <= names
            for name in names:
                held = len(engine.inspect(name, "0", _token_ids).result())
                assert held >= acknowledged.get(name, 0)
                assert write(engine, name, 5) == saved[held]
                assert held == 203 or name == "a"
        moment += every
    assert moment > 15


def test_an_engine_reports_what_a_killed_one_had_not_saved(tmp_path: Path) -> None:
    killed_after(tmp_path, leave_something_unsaved, 0)
    with new_engine(tmp_path) as engine:
        lost, never = sorted(engine.losses)
        assert "'kept' resumes at revision 1" in lost
        assert "up to revision 2" in lost
        assert "'new' was never saved" in never
        assert [record.name for record in engine.sessions().result()] == ["kept"]
    with new_engine(tmp_path) as engine:
        assert engine.losses == []


def test_an_invalid_session_file_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    foreign = tmp_path / "0" / "a.kvkeep"
    foreign.write_bytes(b"something else")
    with new_engine(tmp_path) as engine:
        assert engine.sessions().result() == []
        (line,) = engine.losses
        assert str(foreign) in line
    assert foreign.read_bytes() == b"something else"


def test_no_session_replaces_a_file_that_was_left_unchanged(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        write(engine, "a", 1, text(0, 20))
        engine.snapshot("a", "label").result()
    path = tmp_path / "0" / "a.kvkeep"
    path.write_bytes(damaged := b"damaged" + path.read_bytes()[7:])
    with new_engine(tmp_path) as engine:
        whole_text = GenerationRequest(text(0, 20), 1, whole_text=True)
        for create in (
            lambda: engine.create(name="a"),
            lambda: engine.restore("label", name="a", replace=True),
            lambda: engine.prepare(text(0, 20), "a"),
            lambda: engine.submit(whole_text, "a"),
        ):
            with pytest.raises(StoreError, match=re.escape(str(path))):
                create().result()
        assert engine.sessions().result() == []
        engine.create("other", name="a").result()
        assert path.read_bytes() == damaged
        path.rename(tmp_path / "moved")
        engine.create(name="a").result()
        engine.delete("a").result()
    assert (tmp_path / "moved").read_bytes() == damaged


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


def test_a_snapshot_continues_as_the_session_does_and_is_no_session(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        write(engine, "a", 5, text(0, 40))
        assert engine.snapshot("a", "then").result() > 1000
        ahead = write(engine, "a", 20)
        assert engine.snapshots().names() == ["then"]
    with new_engine(tmp_path) as engine:
        assert [record.name for record in engine.sessions().result()] == ["a"]
        record = engine.restore("then", name="b").result()
        assert record.parent == "a"
        assert write(engine, "b", 20) == ahead
        for label in ("../a", "", "other"):
            with pytest.raises(InvalidArgument):
                engine.restore(label).result()
        with pytest.raises(InvalidArgument):
            engine.snapshot("a", "../../x").result()


def test_names_and_labels_in_a_folder_differ_in_more_than_case(tmp_path: Path) -> None:
    """A file system that ignores case would store both in one file."""
    with new_engine(tmp_path) as engine:
        engine.create(name="Notes").result()
        engine.create(name="notes", owner="b").result()
        write(engine, "Notes", 1, text(0, 20))
        engine.snapshot("Notes", "Then").result()
        for refused in (
            lambda: engine.create(name="notes"),
            lambda: engine.fork("Notes", new_name="NOTES"),
            lambda: engine.prepare(text(0, 20), "notes"),
            lambda: engine.restore("Then", name="notes"),
            lambda: engine.snapshot("Notes", "then"),
        ):
            with pytest.raises(InvalidArgument, match="only in upper and lower case"):
                refused().result()
        engine.snapshot("Notes", "Then").result()
        assert engine.snapshots().names() == ["Then"]
    (tmp_path / "0" / "Broken.kvkeep").write_bytes(b"no snapshot")
    with new_engine(tmp_path) as engine:
        for name in ("notes", "broken"):
            with pytest.raises(InvalidArgument, match="only in upper and lower case"):
                engine.create(name=name).result()
    with new_engine() as engine:  # without files
        assert {engine.create(name=name).result().name for name in ("a", "A")} == {"a", "A"}


def test_an_owner_has_a_limit_of_labelled_snapshots(tmp_path: Path) -> None:
    with new_engine(tmp_path, snapshots_per_owner=2) as engine:
        for owner in ("0", "b"):
            engine.create(name="a", owner=owner).result()
            for label in ("one", "two", "one"):
                engine.snapshot("a", label, owner).result()
            with pytest.raises(
                NoRoom, match="limit of 2 snapshots is reached: delete some"
            ) as error:
                engine.snapshot("a", "three", owner).result()
            assert error.value.retry_after == float("inf")
        engine.snapshots().remove("two")
        engine.snapshot("a", "three").result()
        assert engine.snapshots().names() == ["one", "three"]


def test_a_prompt_over_the_limit_is_refused() -> None:
    with new_engine(prompt_tokens=100) as engine:
        with pytest.raises(InvalidArgument, match="at most 100 tokens"):
            engine.generate(GenerationRequest(text(0, 101), 1))
        assert engine.generate(GenerationRequest(text(0, 100), 1)).text() is not None


def test_a_second_engine_on_a_folder_is_refused_and_the_first_loses_nothing(tmp_path: Path) -> None:
    """Not even marker files: of a session that was saved, and of one that never was."""
    with new_engine(tmp_path, save_idle_after=1e9) as engine:
        engine.create(name="new").result()
        with pytest.raises(Locked):
            new_engine(tmp_path)
        engine.create(name="saved").result()
        engine.save("saved").result()
        write(engine, "saved", 2, text(0, 20))
        engine.delete("new").result()
        with pytest.raises(Locked):
            new_engine(tmp_path)
        assert [path.name for path in (tmp_path / "0").glob("*.unsaved")] == ["saved.unsaved"]


def test_a_full_disk_refuses_no_change_and_sessions_are_saved_once_it_has_room(
    tmp_path: Path,
) -> None:
    with new_engine(tmp_path, save_idle_after=0.02) as engine:
        engine.create(name="a").result()
        write(engine, "a", 1, text(0, 20))
        with small_files_only(1):
            engine.change("a", "0", "edit", lambda session: session.delete(5, 8)).result()
            write(engine, "a", 2, text(0, 5))
            engine.create(name="b").result()
            with pytest.raises(StoreError, match="Free some space"):
                engine.save("a").result()
        tokens = engine.inspect("a", "0", _token_ids).result()
        while any(record.dirty for record in engine.sessions().result()):
            time.sleep(0.01)
    assert len(tokens) == 25
    assert Snapshot.load(tmp_path / "0" / "a.kvkeep").tokens.tolist() == tokens


def test_forks_and_snapshots_count_among_an_owners_sessions(tmp_path: Path) -> None:
    with new_engine(tmp_path, sessions_per_owner=2) as engine:
        engine.create(name="a").result()
        write(engine, "a", 1, text(0, 20))
        engine.snapshot("a", "then").result()
        engine.fork("a", new_name="b").result()
        for more in (
            lambda: engine.create(),
            lambda: engine.fork("a"),
            lambda: engine.restore("then"),
            lambda: engine.prepare(text(0, 20), "c"),
        ):
            with pytest.raises(NoRoom, match="limit of 2 sessions"):
                more().result()
        engine.restore("then", name="b", replace=True).result()
        assert len(engine.sessions().result()) == 2


def test_a_session_stays_if_the_snapshot_that_replaces_it_has_no_room(tmp_path: Path) -> None:
    with new_engine(tmp_path, cells=250) as engine:
        engine.create(name="long").result()
        write(engine, "long", 1, text(0, 200))
        engine.snapshot("long", "then").result()
        engine.delete("long").result()
        engine.create(name="short").result()
        write(engine, "short", 1, text(1, 30))
        before = engine.inspect("short", "0", _token_ids).result()
        busy = [
            engine.generate(GenerationRequest(text(2 + at, 40), 10_000, ignore_eos=True))
            for at in range(2)
        ]
        with pytest.raises(NoRoom):
            engine.restore("then", name="short", replace=True).result()
        for generation in busy:
            generation.cancel()
        while engine.totals().result().running:
            time.sleep(0.01)
        assert engine.inspect("short", "0", _token_ids).result() == before


def test_notes_and_pins_are_saved_with_a_session(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a", notes={"one": 1}).result()
        engine.save("a").result()
        engine.set_notes("a", "0", {"two": [2]}).result()
        engine.set_resident("a", "0", True).result()
    with new_engine(tmp_path) as engine:
        (record,) = engine.sessions().result()
        assert (record.notes, record.resident) == ({"one": 1, "two": [2]}, True)
        # The key in files of all versions.
        assert record.snapshot_notes()[ENGINE_NOTES_KEY]["pinned"] is True


def test_the_former_names_of_resident_are_deprecated_aliases(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        with pytest.warns(DeprecationWarning, match="use Engine.set_resident"):
            record = engine.pin("a", "0", True).result()
        with pytest.warns(DeprecationWarning, match="use SessionRecord.resident"):
            assert record.pinned is record.resident is True


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
