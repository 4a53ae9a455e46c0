"""Folders: new ones survive a power cut; atomic ones appear with all of their files, or not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.storage.files.atomic import atomic_folder, make_folder, sweep_partial_folders
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.sessions.folder import SessionFolder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_appears_with_all_of_its_files(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("some")
        assert not (tmp_path / "model").exists()
    assert names(tmp_path) == ["model", "model/part", "model/part/weights"]


def test_a_new_folder_replaces_the_old_one(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "model") as folder:
            (folder / content).write_text(content)
    assert names(tmp_path) == ["model", "model/new"]


def test_a_failure_while_filling_leaves_the_old_folder(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "old").write_text("old")
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "model") as folder:
        (folder / "missing" / "new").write_text("some")
    assert names(tmp_path) == ["model", "model/old"]


def test_partial_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("some")
    for stale in ("other.partial", "other.old.partial"):
        (tmp_path / stale).mkdir()
        (tmp_path / stale / "weights").write_text("half")
    sweep_partial_folders(tmp_path)
    assert names(tmp_path) == ["model", "model/weights"]


def lock_session(folder: Path) -> None:
    with SessionFolder(folder).lock("a"):
        pass


def lock_sessions(folder: Path) -> None:
    with SessionFolder(folder).lock_all():
        pass


def put(folder: Path) -> None:
    FolderObjectStore(folder.parent).put(f"{folder.name}/object", b"")


@pytest.mark.parametrize("create", [make_folder, lock_session, lock_sessions, put])
def test_new_folders_are_flushed_into_their_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Callable[[Path], object]
) -> None:
    folder, flushed, fsync = tmp_path / "a" / "b" / "c", list[tuple[Path, list[str]]](), os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            flushed.append((path, [entry.name for entry in path.iterdir()]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    create(folder)
    assert folder.is_dir()
    for parent, name in ((tmp_path, "a"), (tmp_path / "a", "b"), (tmp_path / "a" / "b", "c")):
        assert any(path == parent and name in entries for path, entries in flushed)
    flushed.clear()
    make_folder(folder)
    assert not flushed
