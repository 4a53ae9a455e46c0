"""The measurement of fewer cells, in small."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.fewer_cells import fewer_cells


def test_every_method_is_measured_at_every_ratio(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    asked = ["--model", str(tiny_folder), "--tokens", 1000, "--written", 2, "--out", str(out)]
    done = CliRunner().invoke(fewer_cells, [*map(str, asked), "--methods", "kvzip,knorm:heads"])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["readings"]
    assert [(each["method"], each["ratio"]) for each in found] == [
        ("none", 1.0),
        *((method, ratio) for method in ("kvzip", "knorm:heads") for ratio in (2.0, 4.0, 8.0)),
    ]
    for each in found:
        assert each["cells"] == -(-1000 // each["ratio"])
        assert each["tokens_per_s"] > 0
        assert "4x" in done.output


def test_a_text_longer_than_the_model_was_trained_for_is_read(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    tokens = config["max_position_embeddings"] + 100
    asked = ["--model", tiny_folder, "--tokens", tokens, "--written", 1, "--methods", "knorm"]
    done = CliRunner().invoke(fewer_cells, [str(each) for each in asked])
    assert done.exit_code == 0, done.output
    assert f"{tokens:,} cells" in done.output
