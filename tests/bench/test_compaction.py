"""The benchmark of compaction, at a small size."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.compaction import Half, Settings, compaction, run_half


def test_each_kind_of_session_passes_its_threshold(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(settings: Settings, folder: str, is_last: bool) -> Half:
        return run_half(settings, Path(folder), is_last)

    monkeypatch.setattr("benchmarks.compaction._half_in_new_process", run_here)
    out = tmp_path / "result.json"
    arguments = ["--model", tiny_folder, "--max-kv-size", 1024, "--compactions", 2, "--facts", 2]
    command = [*map(str, arguments), "--seeds", "1", "--out", str(out)]
    result = CliRunner().invoke(compaction, command)
    assert result.exit_code == 0, result.output
    readings = json.loads(out.read_text())["readings"]
    assert [reading["facts_in"] for reading in readings] == ["user", "user", "result", "result"]
    for reading in readings:
        assert reading["compactions"] == 2
        assert reading["max_cells"] <= 1024
        assert reading["fork_is_intact"]
