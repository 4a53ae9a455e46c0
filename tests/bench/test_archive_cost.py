"""The benchmark of archives, at small sizes."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.archive_cost import archive_cost


def test_each_archive_is_measured_against_the_window_alone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", tiny_folder, "--max-kv-size", 64, "--methods", "fitted,knorm"]
    result = CliRunner().invoke(
        archive_cost, [*map(str, arguments), "--blocks", "3", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    readings = json.loads(out.read_text())["readings"]
    assert [reading["method"] for reading in readings] == ["none", "fitted", "knorm"]
    assert [readings[0]["steps"], readings[0]["tokens"]] == [1.0, 1.0]
    for reading in readings:
        assert min(reading["step_s"], reading["token_s"]) > 0
        assert reading["cells"] <= 64
    assert result.output.count("a token") == 3
