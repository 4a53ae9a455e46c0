"""The benchmark of compaction, at a small size."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.compaction import compaction


def test_each_kind_of_session_passes_its_threshold(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", tiny_folder, "--max-kv-size", 2048, "--compactions", 2, "--facts", 2]
    result = CliRunner().invoke(compaction, [*map(str, arguments), "--out", str(out)])
    assert result.exit_code == 0, result.output
    readings = json.loads(out.read_text())["readings"]
    assert [reading["facts_in"] for reading in readings] == ["user", "user", "result", "result"]
    for reading in readings:
        assert reading["compactions"] == 2
        assert reading["max_cells"] <= 2048
