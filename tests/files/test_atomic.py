"""Atomic writes: files are complete or absent, and unwritable paths are refused in advance."""

import json
import os
from pathlib import Path

import pytest

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import (
    TEMPORARY_PREFIX,
    atomic_writer,
    check_writable,
    sweep_temporary_files,
    write_atomic,
    write_json,
)


def test_a_written_file_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    check_writable(link)
    assert file.read_text() == "old"
    write_atomic(link, b"new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "report.json"]


@pytest.mark.parametrize("name", ["missing/report.json", ".", "file/report.json"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidArgument):
        check_writable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_atomic(pipe, b"numbers")
    assert os.read(reader, 100) == b"numbers"
    assert pipe.is_fifo()
    os.close(reader)


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_writer(file) as out:
        out.writelines(b"%d" % (1 // divisor) for divisor in (2, 1, 0))
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with atomic_writer(file) as out:
        out.write(b"half")
        out.flush()
        assert not file.exists()
    assert file.read_bytes() == b"half"


def test_sweep_removes_stale_temporaries_and_not_those_in_use(tmp_path: Path) -> None:
    stale = tmp_path / f"{TEMPORARY_PREFIX}0123456789abcdef.json"
    stale.write_text("half")
    with atomic_writer(tmp_path / "report.json") as out:
        assert not stale.exists()
        stale.write_text("half")
        assert sweep_temporary_files(tmp_path) == [stale]
        out.write(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_pipes_and_folders_are_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), atomic_writer(tmp_path / name):
        raise AssertionError("the body must not run")


def test_invalid_json_values_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "report.json", {"rate": float("nan")})
    write_json(tmp_path / "report.json", {"rate": 1.5})
    write_json(None, {"rate": 1.5})
    assert json.loads((tmp_path / "report.json").read_text()) == {"rate": 1.5}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
