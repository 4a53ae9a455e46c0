"""Titles, notes and residence of sessions that are on disk only: changed without their cells."""

import shutil
from pathlib import Path

import pytest
from engine.killed import new_engine, text, write

from kvkeep.engine import Engine, GenerationRequest
from kvkeep.engine.session_disk import SessionDisk
from kvkeep.engine.session_files import SessionFile
from kvkeep.errors import Cancelled, StoreError
from kvkeep.storage.snapshots.header import read_summary

NOTES = {"seen": [1, 2]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a saved session "a" of 51 tokens."""
    with new_engine(tmp_path / "engine") as engine:
        engine.create(name="a", notes={"kept": 1}).result()
        write(engine, "a", 1, text(0, 50))
    return tmp_path / "engine"


def change(engine: Engine) -> None:
    engine.set_title("a", "0", "A title").result()
    engine.set_resident("a", "0", True).result()
    engine.set_notes("a", "0", NOTES).result()


def require_changed(engine: Engine) -> None:
    record = engine.find("a").result()
    assert (record.title, record.resident) == ("A title", True)
    assert record.notes == {"kept": 1, **NOTES}


def test_a_session_on_disk_is_renamed_without_its_cells(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is needed for it, which others may hold, and no session is evicted."""
    read = list[str]()
    restored = SessionDisk.restored

    def counted(self: SessionDisk, snapshot, owner: str):  # type: ignore[no-untyped-def]
        read.append(owner)
        return restored(self, snapshot, owner)

    monkeypatch.setattr(SessionDisk, "restored", counted)
    endless = GenerationRequest(text(9, 10), 100_000, ignore_eos=True)
    with new_engine(folder, cells=350) as engine:
        engine.generate(GenerationRequest(text(1, 48), 1, ignore_eos=True)).text()
        running = [engine.generate(endless) for _ in range(3)]
        before, revision = engine.totals().result().in_memory, engine.find("a").result().revision
        change(engine)
        assert engine.find("a").result().revision == revision + 3
        require_changed(engine)
        assert engine.totals().result().in_memory == before
        assert not read
        for generation in running:
            generation.cancel()
            with pytest.raises(Cancelled):
                generation.text()
        tokens = engine.inspect("a", "0", lambda record: list(record.live.tokens)).result()
        assert tokens[:50] == list(text(0, 50))
        require_changed(engine)
    summary = read_summary(folder / "0" / "a.kvkeep")
    assert summary.notes["engine"]["title"] == "A title"
    assert summary.notes["seen"] == NOTES["seen"]
    assert not list(folder.rglob("*.unsaved"))
    with new_engine(folder) as engine:
        require_changed(engine)
        assert engine.losses == []
        assert engine.find("a").result().revision == revision + 3
        again = engine.generate(
            GenerationRequest((*text(0, 50), *text(2, 5)), 1, ignore_eos=True, whole_text=True), "a"
        )
        again.text()
        assert again.reuse.tokens == 48


def test_a_change_of_a_session_on_disk_outlives_a_kill(folder: Path, tmp_path: Path) -> None:
    def killed(engine_folder: Path, name: str) -> Path:
        """Return the files as a kill would leave them now."""
        return Path(shutil.copytree(engine_folder, tmp_path / name))

    with new_engine(folder, save_idle_after=1e9) as engine:
        change(engine)
        at_once = killed(folder, "at once")
        write(engine, "a", 3)
        revision = engine.find("a").result().revision
        after_answer = killed(folder, "after an answer")
        engine.save("a").result()
        after_save = killed(folder, "after a save")
    with new_engine(at_once) as engine:
        require_changed(engine)
        assert engine.losses == []
        assert engine.find("a").result().lost_revision is None
    for start in range(2):
        with new_engine(killed(after_answer, f"start {start}")) as engine:
            require_changed(engine)
            assert len(engine.losses) == 1
            assert engine.find("a").result().lost_revision == revision
    with new_engine(after_answer, save_idle_after=1e9) as engine:
        engine.totals().result()
        second = killed(after_answer, "second")
    with new_engine(second) as engine:
        require_changed(engine)
        assert engine.losses == []
    with new_engine(after_save) as engine:
        require_changed(engine)
        assert engine.find("a").result().revision == revision
        assert engine.losses == []


def test_a_change_that_cannot_be_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with new_engine(folder) as engine:
        before = engine.find("a").result().revision
        with monkeypatch.context() as patch:
            patch.setattr(SessionFile, "write_marker", fail)
            with pytest.raises(StoreError, match="No space left"):
                engine.set_title("a", "0", "A title").result()
        record = engine.find("a").result()
        assert (record.title, record.revision) == (None, before)
