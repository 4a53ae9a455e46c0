"""The measurement of what archiving costs, in small."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.archive_cost import archive_cost


def test_each_archive_is_measured_beside_the_window_alone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    asked = ["--model", tiny_folder, "--max-kv-size", 64, "--methods", "fitted,knorm"]
    done = CliRunner().invoke(archive_cost, [*map(str, asked), "--blocks", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["readings"]
    assert [each["method"] for each in found] == ["none", "fitted", "knorm"]
    assert [found[0]["steps"], found[0]["tokens"]] == [1.0, 1.0]
    for each in found:
        assert min(each["step_s"], each["token_s"]) > 0
        assert each["cells"] <= 64
    assert done.output.count("a token") == 3
