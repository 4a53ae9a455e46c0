"""Sessions of an engine: within its memory, whose they are, and what a kill leaves of them."""

import contextlib
import random
import threading
import time
from pathlib import Path

import psutil
import pytest
from engine.killed import (
    CELL,
    DRAWN,
    MODEL,
    SETTINGS,
    engine,
    killed_after,
    killed_at,
    leaves_something_unsaved,
    saves_over_and_over,
    text,
    write,
)

from kvkeep.engine import Engine, GenerationRequest
from kvkeep.engine.thread import EngineThread
from kvkeep.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    Locked,
    NoRoom,
    NoSuchSession,
    WrongRevision,
)


def in_memory(made: Engine) -> set[str]:
    return {kept.name for kept in made.sessions().result() if kept.session is not None}


def test_the_session_used_longest_ago_goes_to_disk_and_a_pinned_one_never(tmp_path: Path) -> None:
    with engine(tmp_path, cells=270) as made:
        for name in "abc":
            made.create(name=name).result()
            write(made, name, 1, text(0, 60))
        made.pin("a", "0", True).result()
        made.create(name="d").result()
        write(made, "d", 1, text(1, 60))
        assert in_memory(made) == {"a", "c", "d"}
        write(made, "b", 1)
        assert in_memory(made) == {"a", "b", "d"}


def test_cells_stay_within_the_limit(tmp_path: Path) -> None:
    draw, names = random.Random(3), "abcdefgh"
    with engine(tmp_path, cells=250) as made:
        for name in names:
            made.create(name=name).result()
        for _ in range(60):
            write(made, draw.choice(names), draw.randrange(1, 20), text(draw.randrange(9), 30))
            held = made.totals().result().nbytes
            assert held <= 250 * CELL


def test_without_room_an_answer_is_refused_and_nothing_is_left_behind() -> None:
    with engine(cells=250) as made:
        busy = [
            made.generate(GenerationRequest(text(at, 40), 10_000, ignore_eos=True))
            for at in range(2)
        ]
        with pytest.raises(NoRoom) as refused:
            made.generate(GenerationRequest(text(5, 40), 10_000, ignore_eos=True))
        assert 1 <= refused.value.retry_after < 60
        for answer in busy:
            answer.cancel()
        while made.totals().result().running:
            time.sleep(0.01)
        assert len(list(made.generate(GenerationRequest(text(5, 40), 3, ignore_eos=True)))) > 3


def test_what_could_never_fit_is_refused_for_good() -> None:
    with engine(cells=50) as made, pytest.raises(NoRoom) as refused:
        made.generate(GenerationRequest(text(0, 40), 1000))
    assert refused.value.retry_after == float("inf")


def test_one_owner_sees_nothing_of_another(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("one", "mine").result()
        made.generate(GenerationRequest(text(0, 50), 1), "mine", "one").text()
        with pytest.raises(NoSuchSession):
            made.generate(GenerationRequest((), 1), "mine", "two")
        with pytest.raises(NoSuchSession):
            made.delete("mine", "two").result()
        assert made.sessions("two").result() == []
        prompt = text(7, 50)
        made.generate(GenerationRequest(prompt, 1), owner="one").text()
        assert made.generate(GenerationRequest(prompt, 1), owner="two").reuse.tokens == 0
        assert made.generate(GenerationRequest(prompt, 1), owner="one").reuse.tokens == 48


@pytest.mark.parametrize("owner", ["", "../x", "A", "a" * 65])
def test_an_owner_is_no_path(tmp_path: Path, owner: str) -> None:
    with engine(tmp_path) as made, pytest.raises(InvalidArgument, match="owner"):
        made.create(owner, "name").result()


def test_a_busy_session_takes_no_other_change(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create(name="a").result()
        answer = made.generate(GenerationRequest(text(0, 20), 10**6, ignore_eos=True), "a")
        for change in (
            lambda: made.generate(GenerationRequest((), 1), "a"),
            lambda: made.delete("a").result(),
            lambda: made.change("a", "0", "rewind", lambda session: session.rewind(1)).result(),
        ):
            with pytest.raises(Busy):
                change()
        answer.cancel()


def test_a_change_meant_for_another_revision_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        kept = made.create(name="a").result()
        write(made, "a", 2, text(0, 20))
        revision = kept.revision
        with pytest.raises(WrongRevision):
            made.delete("a", revision=revision - 1).result()
        made.change("a", "0", "rewind", lambda session: session.rewind(1), revision).result()
        assert kept.revision == revision + 1


def test_idle_sessions_are_saved_by_themselves(tmp_path: Path) -> None:
    with engine(tmp_path, save_idle_after=0.05) as made:
        kept = made.create(name="a").result()
        written = write(made, "a", 9, text(0, 20))
        while kept.dirty:
            time.sleep(0.01)
    with engine(tmp_path) as made:
        assert made.losses == []
        session = MODEL.session(**SETTINGS)
        session.feed(text(0, 20))
        assert [session.next_token(DRAWN) for _ in range(9)] == written
        assert write(made, "a", 9) == [session.next_token(DRAWN) for _ in range(9)]


def test_ended_it_saves_what_is_not(tmp_path: Path) -> None:
    with engine(tmp_path, save_idle_after=1e9) as made:
        made.create(name="a").result()
        write(made, "a", 9, text(0, 20))
        revision = made.sessions().result()[0].revision
    with engine(tmp_path) as made:
        assert made.losses == []
        assert made.sessions().result()[0].revision == revision


def test_a_deleted_session_is_gone_whatever_was_being_saved(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        for _ in range(20):
            made.create(name="a").result()
            write(made, "a", 1, text(0, 60))
            saved = made.save("a")
            made.delete("a").result()
            with contextlib.suppress(NoSuchSession):
                saved.result()
    assert [path.name for path in (tmp_path / "0").iterdir()] == []


def test_another_engine_cannot_have_the_same_session(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.create(name="a").result()
        with pytest.raises(InvalidArgument, match="already"):
            one.create(name="a").result()


@pytest.mark.parametrize("moment", range(12))
def test_killed_what_was_acknowledged_as_saved_is_there_to_the_bit(
    tmp_path: Path, moment: int
) -> None:
    """The session is written to and saved, over and over, and each acknowledged save is told."""

    acknowledged = killed_after(tmp_path, saves_over_and_over, 0.013 * moment)[-1][1]
    session = MODEL.session(**SETTINGS)
    session.feed(text(0, 40))
    with engine(tmp_path) as made:
        held = made.inspect("a", "0", lambda kept: kept.live.tokens.tolist()).result()
        assert len(held) >= acknowledged
        while len(session.tokens) < len(held):
            session.next_token(DRAWN)
        assert session.tokens == held
        assert write(made, "a", 20) == [session.next_token(DRAWN) for _ in range(20)]


def test_killed_at_any_change_of_the_disk_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    """And goes on to the bit; another session than those is never half there."""
    session = MODEL.session(**SETTINGS)
    session.feed(text(0, 40))
    expected = [*text(0, 40), *(session.next_token(DRAWN) for _ in range(60))]
    moment = 0
    while (told := killed_at(folder := tmp_path / str(moment), moment)) is not None:
        acknowledged = dict(told)
        with engine(folder) as made:
            if "snapshot" in acknowledged:
                made.restore("s", name="snapshot").result()
            there = {kept.name for kept in made.sessions().result()}
            assert {name for name, count in acknowledged.items() if count} - {"b"} <= there
            for name in there:
                held = made.inspect(name, "0", lambda kept: kept.live.tokens.tolist()).result()
                assert len(held) >= acknowledged.get(name, 0)
                assert held == expected[: len(held)]
                if len(held) > 40:
                    assert write(made, name, 5) == expected[len(held) : len(held) + 5]
        moment += 1
    assert moment > 40


def test_killed_it_says_what_was_lost(tmp_path: Path) -> None:
    killed_after(tmp_path, leaves_something_unsaved, 0)
    with engine(tmp_path) as made:
        lost, never = sorted(made.losses)
        assert "'kept' goes on from revision 1" in lost
        assert "up to 2" in lost
        assert "'new' was never saved" in never
        assert [kept.name for kept in made.sessions().result()] == ["kept"]
    with engine(tmp_path) as made:
        assert made.losses == []


def test_a_file_that_is_no_session_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    foreign = tmp_path / "0" / "a.kvkeep"
    foreign.write_bytes(b"something else")
    with engine(tmp_path) as made:
        assert made.sessions().result() == []
        (line,) = made.losses
        assert str(foreign) in line
    assert foreign.read_bytes() == b"something else"


def test_many_answers_leave_memory_as_it_was() -> None:
    with engine(cells=1000) as made:

        def some(seed: int) -> int:
            for at in range(150):
                made.generate(
                    GenerationRequest(text(seed + at, 30), 2, DRAWN, ignore_eos=True)
                ).text()
            return int(psutil.Process().memory_info().rss)

        some(0)
        before = some(1000)
        assert some(2000) - before < 8_000_000
        assert made.totals().result().nbytes <= 1000 * CELL


def test_a_snapshot_goes_on_as_the_session_does_and_is_no_session(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create(name="a").result()
        write(made, "a", 5, text(0, 40))
        assert made.snapshot("a", "then").result() > 1000
        ahead = write(made, "a", 20)
        assert made.snapshots().names() == ["then"]
    with engine(tmp_path) as made:
        assert [kept.name for kept in made.sessions().result()] == ["a"]
        kept = made.restore("then", name="b").result()
        assert kept.parent == "a"
        assert write(made, "b", 20) == ahead
        for label in ("../a", "", "other"):
            with pytest.raises(InvalidArgument):
                made.restore(label).result()
        with pytest.raises(InvalidArgument):
            made.snapshot("a", "../../x").result()


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_done() -> None:
    with engine(prompt_tokens=100) as made:
        with pytest.raises(InvalidArgument, match="at most 100 tokens"):
            made.generate(GenerationRequest(text(0, 101), 1))
        assert made.generate(GenerationRequest(text(0, 100), 1)).text() is not None


def test_a_second_engine_on_a_folder_is_refused_and_the_first_loses_nothing(tmp_path: Path) -> None:
    """Not even what tells of a kill: of a session that was saved, and of one that never was."""
    with engine(tmp_path, save_idle_after=1e9) as made:
        made.create(name="new").result()
        with pytest.raises(Locked):
            engine(tmp_path)
        made.create(name="saved").result()
        made.save("saved").result()
        write(made, "saved", 2, text(0, 20))
        made.delete("new").result()
        with pytest.raises(Locked):
            engine(tmp_path)
        assert [path.name for path in (tmp_path / "0").glob("*.unsaved")] == ["saved.unsaved"]


def test_forks_and_snapshots_count_among_an_owners_sessions(tmp_path: Path) -> None:
    with engine(tmp_path, sessions_per_owner=2) as made:
        made.create(name="a").result()
        write(made, "a", 1, text(0, 20))
        made.snapshot("a", "then").result()
        made.fork("a", new="b").result()
        for more in (
            lambda: made.create(),
            lambda: made.fork("a"),
            lambda: made.restore("then"),
            lambda: made.prepare(text(0, 20), "c"),
        ):
            with pytest.raises(NoRoom, match="2 sessions already"):
                more().result()
        made.restore("then", name="b", replace=True).result()
        assert len(made.sessions().result()) == 2


def test_what_is_kept_beside_a_session_is_saved_with_it(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create(name="a", notes={"one": 1}).result()
        made.save("a").result()
        made.set_notes("a", "0", {"two": [2]}).result()
        made.pin("a", "0", True).result()
    with engine(tmp_path) as made:
        (kept,) = made.sessions().result()
        assert (kept.notes, kept.pinned) == ({"one": 1, "two": [2]}, True)


def test_who_asks_an_engine_that_ends_is_told(tmp_path: Path) -> None:
    made, answers = engine(tmp_path), list[object]()

    def ask() -> None:
        while True:
            try:
                made.call(lambda: None).result()
            except Cancelled as error:
                answers.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    made.close()
    for thread in threads:
        thread.join()
    assert len(answers) == 8


def test_a_listener_that_fails_ends_nobody_elses_work() -> None:
    """Such as one whose event loop has closed: without a guard the engine's thread died of it."""
    told: list[str] = []

    def fails(operation: object) -> None:
        raise RuntimeError("Event loop is closed")

    with engine() as made:
        stop = made.watch(fails)
        made.watch(lambda operation: told.append(operation.what))
        made.create(name="a").result(60)
        assert write(made, "a", 3, text(0, 20))
        stop()
    assert told == ["create", "generate"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_are_cancelled_once_the_engine_thread_has_failed() -> None:
    def step() -> bool:
        raise RuntimeError("a defect of the engine")

    thread = EngineThread(step, 60, lambda: None)
    thread.start()
    futures = [thread.call(lambda: None) for _ in range(3)]
    for future in futures:
        with contextlib.suppress(Cancelled):
            future.result(60)
    thread.close()
    with pytest.raises(Cancelled):
        thread.call(lambda: None).result(60)
