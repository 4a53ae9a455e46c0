"""The benchmark of users of a server with faults, at small sizes."""

import json
from collections import Counter
from pathlib import Path

from click.testing import CliRunner

from benchmarks.soak_faults.__main__ import soak_faults
from benchmarks.soak_faults.faults import KINDS, schedule


def test_a_schedule_is_that_of_its_seed_and_has_all_kinds() -> None:
    count = 2 * len(KINDS)
    operations = 100 * (count + 1)
    faults = schedule(1, operations, 100)
    assert faults == schedule(1, operations, 100)
    assert faults != schedule(2, operations, 100)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 2)
    assert [fault.at // 100 for fault in faults] == list(range(1, count + 1))


def test_users_find_their_sessions_as_they_left_them(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", str(tiny_folder), "--operations", "180", "--fault-every", "18"]
    result = CliRunner().invoke(soak_faults, [*arguments, "--users", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["violations"] == []
    assert sum(report["operations"].values()) >= 180
    assert report["faults"]["kill"] >= 1
    assert report["faults"]["cut"] >= 1
    assert report["recovery_seconds"] < 60
