"""A folder of sessions: names, locks, leftovers of dead processes, and moving to a new folder."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.sessions.folder_lock import exclusive_lock, is_locked


@pytest.mark.parametrize("name", ["a", "Notes-2", "a.b_c", "7", "_x", "x" * 100])
def test_a_session_name_is_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
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
def test_invalid_names_are_refused(tmp_path: Path, name: str) -> None:
    folder = SessionFolder(tmp_path)
    with pytest.raises(InvalidArgument, match="name must be"):
        folder.path(name)
    with pytest.raises(InvalidArgument, match="name must be"), folder.lock(name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_new_name_differs_from_others_in_more_than_case(tmp_path: Path) -> None:
    """A file system that ignores case would store both in one file."""
    legacy, folder = (
        SessionFolder(tmp_path / "old"),
        SessionFolder(tmp_path / "new", tmp_path / "old"),
    )
    for sessions, name in ((legacy, "Trip"), (folder, "Notes")):
        with sessions.lock(name) as path:
            path.touch()
    for name, existing in (("notes", "Notes"), ("NOTES", "Notes"), ("trip", "Trip")):
        with (
            pytest.raises(InvalidArgument, match=f"'{name}' differs from '{existing}'"),
            folder.lock(name),
        ):
            pass
    (tmp_path / "new" / "notes.kvkeep").touch()  # by an earlier version
    for name in ("Notes", "notes", "Trip"):
        with folder.lock(name):
            pass
    assert {*(tmp_path / "new").glob("*.kvkeep")} == {
        tmp_path / "new" / f"{name}.kvkeep" for name in ("Notes", "notes", "Trip")
    }


def test_a_session_is_locked_by_one_process_at_a_time(tmp_path: Path) -> None:
    one, other = SessionFolder(tmp_path), SessionFolder(tmp_path)
    with one.lock("a"):
        with (
            pytest.raises(Locked, match="session 'a' is in use by another process"),
            other.lock("a"),
        ):
            pass
        with other.lock("b"):
            pass
    with other.lock("a") as path:
        assert path == tmp_path / "a.kvkeep"


def test_sessions_are_listed_by_name_and_by_age(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    for age, name in enumerate(("c", "a", "b")):
        (tmp_path / f"{name}.kvkeep").write_bytes(b"x")
        os.utime(tmp_path / f"{name}.kvkeep", (1000 - age, 1000 - age))
    for stray in (".kvkeep-writing-1-x-a.kvkeep", "not a name.kvkeep", "notes.txt"):
        (tmp_path / stray).write_bytes(b"x")
    (tmp_path / "folder.kvkeep").mkdir()
    assert folder.names() == ["a", "b", "c"]
    assert [path.stem for path in folder.newest_first()] == ["c", "a", "b"]
    assert folder.existing_path("a") == tmp_path / "a.kvkeep"
    with pytest.raises(InvalidArgument, match="no session 'd'; expected one of: a, b, c"):
        folder.existing_path("d")


def test_a_missing_folder_is_listed_as_empty(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "none")
    assert folder.names() == []
    assert list(folder.newest_first()) == []
    assert folder.sweep() == []
    assert not (tmp_path / "none").exists()


def test_remove_deletes_all_files_and_refuses_a_locked_session(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    with folder.lock("a") as path:
        path.write_bytes(b"12345")
        with pytest.raises(Locked):
            SessionFolder(tmp_path).remove("a")
        assert path.read_bytes() == b"12345"
    assert folder.remove("a") == 5
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_the_leftovers_of_dead_processes(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    with folder.lock("kept") as path:
        path.write_bytes(b"x")
    with folder.lock("gone"):
        pass
    temporary = tmp_path / ".kvkeep-writing-0123456789abcdef.kvkeep"
    temporary.write_bytes(b"half")
    with folder.lock("begun"):  # a session whose first save is still to come
        removed = SessionFolder(tmp_path).sweep()
        assert sorted(removed) == sorted([temporary, tmp_path / ".gone.lock"])
        assert not any(file.exists() for file in removed)
        with pytest.raises(Locked), SessionFolder(tmp_path).lock("begun"):
            pass
    assert path.read_bytes() == b"x"


def test_a_removed_session_leaves_no_unfinished_file(tmp_path: Path) -> None:
    (tmp_path / "a.kvkeep").write_bytes(b"x")
    (tmp_path / ".kvkeep-writing-0123456789abcdef.kvkeep").write_bytes(b"half")
    SessionFolder(tmp_path).remove("a")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_removed_at_the_same_time_is_no_lock(tmp_path: Path) -> None:
    """A process opens the lock file, another removes the session, and the first one locks it."""
    script = Path(__file__).with_name("lock_removed_session.py")
    result = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "locked once\n"), result.stderr


def test_a_folder_that_cannot_be_created_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with (
        pytest.raises(StoreError, match="cannot be stored"),
        SessionFolder(tmp_path / "file" / "x").lock("a"),
    ):
        pass


@pytest.fixture
def migrating_folder(tmp_path: Path) -> SessionFolder:
    """A folder with session a, over an older folder with sessions a (out of date), b and c."""
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "new" / "a.kvkeep").write_bytes(b"newer a")
    for age, name in enumerate("abc"):
        file = tmp_path / "old" / f"{name}.kvkeep"
        file.write_bytes(f"old {name}".encode())
        os.utime(file, (1000 - age, 1000 - age))
    return SessionFolder(tmp_path / "new", legacy_root=tmp_path / "old")


def test_sessions_in_an_older_folder_are_found(
    migrating_folder: SessionFolder, tmp_path: Path
) -> None:
    assert migrating_folder.names() == ["a", "b", "c"]
    assert [path.read_bytes() for path in migrating_folder.newest_first()] == [
        b"newer a",
        b"old b",
        b"old c",
    ]
    assert migrating_folder.existing_path("a") == tmp_path / "new" / "a.kvkeep"
    assert migrating_folder.existing_path("b") == tmp_path / "old" / "b.kvkeep"
    with pytest.raises(InvalidArgument, match="a, b, c"):
        migrating_folder.existing_path("d")
    only_old = SessionFolder(tmp_path / "none", legacy_root=tmp_path / "old")
    assert only_old.names() == ["a", "b", "c"]
    assert not (tmp_path / "none").exists(), "listing creates no folder"


@pytest.mark.parametrize("other_disk", [False, True])
def test_a_session_moves_to_the_new_folder_when_it_is_locked(
    migrating_folder, tmp_path: Path, monkeypatch, other_disk
) -> None:
    if other_disk:
        rename = Path.rename

        def refused(self: Path, target: Path) -> Path:
            if self.parent != Path(target).parent:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", refused)
    with migrating_folder.lock("b") as path:
        assert path == tmp_path / "new" / "b.kvkeep"
        assert path.read_bytes() == b"old b"
        assert path.stat().st_mtime == 999
    with migrating_folder.lock("a") as path, migrating_folder.lock("new"):
        assert path.read_bytes() == b"newer a"
    assert sorted(file.name for file in (tmp_path / "old").iterdir()) == ["a.kvkeep", "c.kvkeep"]
    assert migrating_folder.names() == ["a", "b", "c"]
    assert migrating_folder.remove("c") == 5
    assert migrating_folder.names() == ["a", "b"]


def test_a_session_locked_in_the_old_folder_is_not_moved(migrating_folder, tmp_path: Path) -> None:
    with SessionFolder(tmp_path / "old").lock("b"):
        with pytest.raises(Locked), migrating_folder.lock("b"):
            pass
        with migrating_folder.lock("c"):
            pass
    assert (tmp_path / "old" / "b.kvkeep").read_bytes() == b"old b"
    (tmp_path / "old" / ".gone.lock").touch()
    assert tmp_path / "old" / ".gone.lock" in migrating_folder.sweep()


def test_a_removed_session_is_removed_from_the_old_folder_too(
    migrating_folder, tmp_path: Path
) -> None:
    with SessionFolder(tmp_path / "old").lock("a"), pytest.raises(Locked):
        migrating_folder.remove("a")
    assert migrating_folder.existing_path("a").read_bytes() == b"newer a"
    assert migrating_folder.remove("a") == len(b"newer a")
    assert migrating_folder.names() == ["b", "c"]


def test_a_session_that_cannot_be_moved_stays_in_the_old_folder(
    migrating_folder, tmp_path: Path, monkeypatch
) -> None:
    def no_space(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", no_space)
    with pytest.raises(StoreError, match="it is unchanged"), migrating_folder.lock("b"):
        pass
    assert migrating_folder.existing_path("b").read_bytes() == b"old b"


def test_a_session_removed_by_another_process_is_reported_as_missing(
    tmp_path: Path, monkeypatch
) -> None:
    folder, file = SessionFolder(tmp_path), tmp_path / "a.kvkeep"
    file.write_bytes(b"x")
    acquire = FileLock.acquire

    def after_a_removal(self: FileLock, **options: object) -> object:
        file.unlink()
        return acquire(self, **options)

    monkeypatch.setattr(FileLock, "acquire", after_a_removal)
    with pytest.raises(InvalidArgument, match="no session 'a'"):
        folder.remove("a")


def test_a_lock_file_that_cannot_be_removed_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, removed = tmp_path / "lock", Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="Read-only"), exclusive_lock(path):
        pass
    monkeypatch.setattr(Path, "unlink", removed)
    assert not is_locked(path)
