"""A folder of sessions: names that stay inside it, one writer at a time, nothing left behind."""

import errno
import os
from pathlib import Path

import pytest
from filelock import FileLock

from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.storage.sessions.folder import SessionFolder


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


@pytest.fixture
def moved(tmp_path: Path) -> SessionFolder:
    """A folder, and an older one with sessions a (of which the folder has a newer), b and c."""
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "new" / "a.kvkeep").write_bytes(b"newer a")
    for age, name in enumerate("abc"):
        file = tmp_path / "old" / f"{name}.kvkeep"
        file.write_bytes(f"old {name}".encode())
        os.utime(file, (1000 - age, 1000 - age))
    return SessionFolder(tmp_path / "new", older=tmp_path / "old")


def test_sessions_in_an_older_folder_are_found(moved: SessionFolder, tmp_path: Path) -> None:
    assert moved.names() == ["a", "b", "c"]
    assert [path.read_bytes() for path in moved.newest()] == [b"newer a", b"old b", b"old c"]
    assert moved.existing("a") == tmp_path / "new" / "a.kvkeep"
    assert moved.existing("b") == tmp_path / "old" / "b.kvkeep"
    with pytest.raises(InvalidArgument, match="a, b, c"):
        moved.existing("d")
    only_old = SessionFolder(tmp_path / "none", older=tmp_path / "old")
    assert only_old.names() == ["a", "b", "c"]
    assert not (tmp_path / "none").exists(), "looking makes no folder"


@pytest.mark.parametrize("other_disk", [False, True])
def test_a_session_moves_when_it_is_locked(moved, tmp_path: Path, monkeypatch, other_disk) -> None:
    if other_disk:
        rename = Path.rename

        def refused(self: Path, target: Path) -> Path:
            if self.parent != Path(target).parent:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", refused)
    with moved.lock("b") as path:
        assert path == tmp_path / "new" / "b.kvkeep"
        assert path.read_bytes() == b"old b"
        assert path.stat().st_mtime == 999
    with moved.lock("a") as path, moved.lock("new"):
        assert path.read_bytes() == b"newer a"
    assert sorted(file.name for file in (tmp_path / "old").iterdir()) == ["a.kvkeep", "c.kvkeep"]
    assert moved.names() == ["a", "b", "c"]
    assert moved.remove("c") == 5
    assert moved.names() == ["a", "b"]


def test_a_session_in_use_where_it_was_is_not_moved(moved, tmp_path: Path) -> None:
    with SessionFolder(tmp_path / "old").lock("b"):
        with pytest.raises(Locked), moved.lock("b"):
            pass
        with moved.lock("c"):
            pass
    assert (tmp_path / "old" / "b.kvkeep").read_bytes() == b"old b"
    (tmp_path / "old" / ".gone.lock").touch()
    assert tmp_path / "old" / ".gone.lock" in moved.sweep()


def test_a_session_that_cannot_be_moved_is_where_it_was(moved, tmp_path: Path, monkeypatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StoreError, match="it is where it was"), moved.lock("b"):
        pass
    assert moved.existing("b").read_bytes() == b"old b"


def test_a_session_removed_while_it_is_looked_for_is_not_there(tmp_path: Path, monkeypatch) -> None:
    folder, file = SessionFolder(tmp_path), tmp_path / "a.kvkeep"
    file.write_bytes(b"x")
    acquire = FileLock.acquire

    def late(self: FileLock, **how: object) -> object:
        file.unlink()
        return acquire(self, **how)

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(InvalidArgument, match="no session 'a'"):
        folder.remove("a")
