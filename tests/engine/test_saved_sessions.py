"""When an engine saves its sessions, also beside evictions and deletions; and snapshots of them."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.killed import (
    DRAWN,
    MODEL,
    SETTINGS,
    new_engine,
    text,
    write,
)

from kvkeep.engine import (
    GenerationRequest,
    SessionRecord,
)
from kvkeep.engine.session_files import ENGINE_NOTES_KEY
from kvkeep.errors import (
    Cancelled,
    InvalidArgument,
    NoRoom,
    NoSuchSession,
)


def _token_ids(record: SessionRecord) -> list[int]:
    return record.live.tokens.tolist()


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


def test_a_session_without_a_name_is_not_saved_whatever_folder_there_is(tmp_path: Path) -> None:
    with new_engine(tmp_path) as engine:
        generation = engine.generate(GenerationRequest(text(0, 40), 1, ignore_eos=True))
        generation.text()
        with pytest.raises(InvalidArgument, match="only sessions that were created by name"):
            engine.save(generation.record.name).result()
    with new_engine() as engine:
        engine.create(name="a").result()
        with pytest.raises(InvalidArgument, match="has no folder for sessions"):
            engine.save("a").result()
