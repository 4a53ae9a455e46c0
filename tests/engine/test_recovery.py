"""Sessions of an engine after a kill, beside invalid files, and on a full disk."""

import re
import time
from pathlib import Path

import pytest
from engine.killed import (
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
    GenerationRequest,
    SessionRecord,
)
from kvkeep.errors import (
    Locked,
    StoreError,
)


def _token_ids(record: SessionRecord) -> list[int]:
    return record.live.tokens.tolist()


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
