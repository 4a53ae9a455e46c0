"""An engine keeps no file open for a session, and one lock for all sessions of an owner."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine.killed import new_engine, text, write

from kvkeep.errors import Locked
from kvkeep.storage.sessions.folder import SessionFolder


def test_there_may_be_more_sessions_than_open_files(tmp_path: Path) -> None:
    """They are created, saved at the end, and found by the next engine."""
    command = [sys.executable, "-m", "engine.few_files", tmp_path]
    folder = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "100 []\n"), result.stderr


def test_no_other_process_has_the_lock_of_an_engines_session(tmp_path: Path) -> None:
    """Neither of one in memory nor of one on disk, nor under a name that is still free."""
    folder = SessionFolder(tmp_path / "0")
    with new_engine(tmp_path) as engine:
        engine.create(name="a").result()
        write(engine, "a", 1, text(0, 20))
        engine.save("a").result()
        for name in ("a", "b"):
            with pytest.raises(Locked, match="another process"), folder.lock(name):
                pass
        with pytest.raises(Locked):
            folder.remove("a")
    with folder.lock("a"), folder.lock("b"):
        pass


def test_an_engine_takes_no_folder_in_which_a_session_is_locked(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "0")
    with folder.lock("a"), new_engine(tmp_path) as engine:
        with pytest.raises(Locked):
            engine.create(name="b").result()
        engine.create("1", name="b").result()
    with new_engine(tmp_path) as engine:
        engine.create(name="b").result()
