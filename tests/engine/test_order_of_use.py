"""The order in which sessions were used, after a restart."""

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.killed import new_engine

from kvkeep import Snapshot
from kvkeep.engine import SessionOperations


def _save_three(folder: Path) -> list[Path]:
    """Save sessions "b", "c" and "a", whose order of use is another one; return their files."""
    with new_engine(folder, save_idle_after=1e9) as engine:
        for name in ("a", "b", "c"):
            engine.create(name=name).result()
        engine.use("b").result()
        for name in ("b", "c", "a"):
            engine.save(name).result()
    paths = [folder / "0" / f"{name}.kvkeep" for name in ("b", "c", "a")]
    for age, path in enumerate(paths):
        os.utime(path, (age, 1_000_000 + age))
    return paths


def _set_used(path: Path, used: float | None) -> None:
    """Replace the time of the last use in a session's file, or remove it."""
    snapshot, status = Snapshot.load(path), path.stat()
    engine_notes = {**snapshot.notes["engine"], "used": used}
    if used is None:
        del engine_notes["used"]
    replace(snapshot, notes={"engine": engine_notes}).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_order_of_use_survives_restarts(tmp_path: Path) -> None:
    """Also where a session is saved again without a use."""
    _save_three(tmp_path)
    for again in ("a", "c", "a"):
        with new_engine(tmp_path) as engine:
            assert [record.name for record in engine.sessions().result()] == ["b", "c", "a"]
            drop = partial(SessionOperations.drop_cells, name=again, owner="0", notes={})
            engine.run(drop).result()


def test_files_without_a_time_of_use_count_as_used_when_they_were_saved(tmp_path: Path) -> None:
    for path in _save_three(tmp_path):
        _set_used(path, None)
    with new_engine(tmp_path) as engine:
        assert [record.name for record in engine.sessions().result()] == ["a", "c", "b"]


def test_a_session_of_now_comes_before_those_used_in_the_future(tmp_path: Path) -> None:
    """The clock may have been set back since then."""
    for path in _save_three(tmp_path):
        _set_used(path, time.time() + 1e6)
    with new_engine(tmp_path) as engine:
        engine.create(name="new").result()
        assert engine.sessions().result()[0].name == "new"
