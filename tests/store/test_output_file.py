"""Files that commands write are whole, and refused before the work if they cannot be written."""

import os
from pathlib import Path

import pytest

from kvkeep.errors import InvalidArgument
from kvkeep.store.output_file import check_writable, write_whole


def test_a_written_file_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    check_writable(link)
    assert file.read_text() == "old"
    write_whole(link, b"new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "report.json"]


@pytest.mark.parametrize("name", ["missing/report.json", ".", "file/report.json"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidArgument):
        check_writable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_whole(pipe, b"numbers")
    assert os.read(reader, 100) == b"numbers"
    assert pipe.is_fifo()
    os.close(reader)
