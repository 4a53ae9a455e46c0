"""Atomic folders: a folder appears with all of its files, or not at all."""

from pathlib import Path

import pytest

from kvkeep.storage.files.atomic import atomic_folder, sweep_partial_folders


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
