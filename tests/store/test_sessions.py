"""A folder of sessions: names that stay inside it, one writer at a time, nothing left behind."""

import os
from pathlib import Path

import pytest

from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.store.sessions import SessionFolder


@pytest.mark.parametrize("name", ["a", "Notes-2", "a.b_c", "7", "_x", "x" * 100])
def test_a_name_is_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
    assert SessionFolder(tmp_path).path(name) == tmp_path / f"{name}.kvkeep"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a..b",
        "../a",
        "a/b",
        "/etc/x",
        "a b",
        "a\n",
        "é",
        "x" * 101,
        "a\0",
    ],
)
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    folder = SessionFolder(tmp_path)
    with pytest.raises(InvalidArgument, match="name must be"):
        folder.path(name)
    with pytest.raises(InvalidArgument, match="name must be"), folder.lock(name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_session_has_one_user_at_a_time(tmp_path: Path) -> None:
    one, other = SessionFolder(tmp_path), SessionFolder(tmp_path)
    with one.lock("a"):
        with pytest.raises(Locked, match="another process is using session 'a'"), other.lock("a"):
            pass
        with other.lock("b"):
            pass
    with other.lock("a") as path:
        assert path == tmp_path / "a.kvkeep"


def test_sessions_are_found_by_name_and_by_age(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    for age, name in enumerate(("c", "a", "b")):
        (tmp_path / f"{name}.kvkeep").write_bytes(b"x")
        os.utime(tmp_path / f"{name}.kvkeep", (1000 - age, 1000 - age))
    for stray in (".kvkeep-writing-1-x-a.kvkeep", "not a name.kvkeep", "notes.txt"):
        (tmp_path / stray).write_bytes(b"x")
    (tmp_path / "folder.kvkeep").mkdir()
    assert folder.names() == ["a", "b", "c"]
    assert [path.stem for path in folder.newest()] == ["c", "a", "b"]
    assert folder.existing("a") == tmp_path / "a.kvkeep"
    with pytest.raises(InvalidArgument, match="no session 'd'; expected one of: a, b, c"):
        folder.existing("d")


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "none")
    assert folder.names() == []
    assert list(folder.newest()) == []
    assert folder.sweep() == []
    assert not (tmp_path / "none").exists()


def test_remove_leaves_nothing_and_refuses_what_is_in_use(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    with folder.lock("a") as path:
        path.write_bytes(b"12345")
        with pytest.raises(Locked):
            SessionFolder(tmp_path).remove("a")
        assert path.read_bytes() == b"12345"
    assert folder.remove("a") == 5
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    with folder.lock("kept") as path:
        path.write_bytes(b"x")
    with folder.lock("gone"):
        pass
    left = tmp_path / ".kvkeep-writing-0123456789abcdef.kvkeep"
    left.write_bytes(b"half")
    with folder.lock("begun"):  # a session whose first save is still to come
        removed = SessionFolder(tmp_path).sweep()
        assert sorted(removed) == sorted([left, tmp_path / ".gone.lock"])
        assert not any(file.exists() for file in removed)
        with pytest.raises(Locked), SessionFolder(tmp_path).lock("begun"):
            pass
    assert path.read_bytes() == b"x"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with (
        pytest.raises(StoreError, match="cannot be kept"),
        SessionFolder(tmp_path / "file" / "x").lock("a"),
    ):
        pass
