"""Sessions of an engine that the command line changes or copies: no stale notes stay in them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Invoke

from kvkeep import Snapshot
from kvkeep.engine.session_files import ENGINE_NOTES_KEY

NOTED = {
    "name": "s",
    "revision": 5,
    "title": "A story",
    "created": 1000.0,
    "parent": "r",
    "evaluated": 4,
    "sampled": 3,
    "droppable": 1,
    "steps": "512",
    "answers": [],
}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the command line's sessions."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "sessions"


@pytest.fixture
def noted(invoke: Invoke, tiny: list[str], sessions: Path) -> Path:
    """A session with an engine's notes."""
    done = invoke("generate", "-p", "one two three four", "-n", 4, "--session", "s", *tiny)
    assert done.exit_code == 0, done.stderr
    file = sessions / "s.kvkeep"
    snapshot = Snapshot.load(file)
    replace(snapshot, notes={**snapshot.notes, ENGINE_NOTES_KEY: NOTED}).save(file, "zstd")
    return file


def engine_notes(file: Path) -> Any:
    return Snapshot.load(file).notes.get(ENGINE_NOTES_KEY)


def test_a_change_increases_the_revision(invoke: Invoke, tiny: list[str], noted: Path) -> None:
    """An engine refuses a change of revision 5 then; how the text was evaluated is not known."""
    kept = {name: NOTED[name] for name in ("name", "title", "created", "parent")}
    for revision in (6, 7):
        assert invoke("generate", "-p", " five", "-n", 2, "--session", "s", *tiny).exit_code == 0
        assert engine_notes(noted) == {**kept, "revision": revision}
    unchanged = noted.read_bytes()
    assert invoke("generate", "-n", 0, "--session", "s", *tiny).exit_code == 0
    assert noted.read_bytes() == unchanged


def test_copies_have_no_name_and_revision_of_another_session(
    invoke: Invoke, noted: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "exported.kvkeep"
    assert invoke("sessions", "export", "s", exported).exit_code == 0
    for command in (("fork", "s", "a"), ("fork", "s", "b", "--at", 3), ("import", exported, "c")):
        done = invoke("sessions", *command)
        assert done.exit_code == 0, done.stderr
    of_text = {
        key: note for key, note in NOTED.items() if key not in ("name", "revision", "parent")
    }
    for name, kept in (("a", of_text), ("b", None), ("c", of_text)):
        assert engine_notes(noted.with_stem(name)) == kept
        assert Snapshot.load(noted.with_stem(name)).codec == "zstd"
    assert engine_notes(noted) == NOTED


def test_a_branch_of_a_chat_has_no_name_and_revision_of_another_session(
    invoke: Invoke, tiny: list[str], sessions: Path
) -> None:
    chat = ("chat", "--session", "c", "-n", 2, *tiny)
    assert invoke(*chat, input="Hi\n").exit_code == 0
    file = sessions / "c.kvkeep"
    snapshot = Snapshot.load(file)
    replace(snapshot, notes={**snapshot.notes, ENGINE_NOTES_KEY: NOTED}).save(file)
    done = invoke(*chat, input="/branch other\nHello\n/switch main\nBye\n")
    assert done.exit_code == 0, done.stderr
    assert engine_notes(file)["revision"] > 5
    assert engine_notes(file.with_stem("c-other")) is None


def test_one_session_named_twice_is_removed_once(invoke: Invoke, noted: Path) -> None:
    assert invoke("sessions", "fork", "s", "t").exit_code == 0
    removed = invoke("sessions", "rm", "s", "s", "t")
    assert removed.exit_code == 0, removed.stderr
    assert removed.stdout.count("removed") == 2


def test_a_later_prompt_is_never_taken_for_the_first(
    invoke: Invoke, tiny: list[str], noted: Path
) -> None:
    """A copy that is shorter than the first prompt has none."""
    assert invoke("sessions", "fork", "s", "t", "--at", 3).exit_code == 0
    continued = ("generate", "-p", " five six seven", "-n", 2, "--session", "t", *tiny)
    assert invoke(*continued).exit_code == 0
    refused = invoke(*continued, "--keep", -1)
    assert refused.exit_code == 2
    assert "whose length was not saved" in refused.stderr
