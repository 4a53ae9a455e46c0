"""The benchmark of compressed sessions, at small sizes."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.fewer_cells import fewer_cells


def test_every_method_is_measured_at_every_ratio(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", str(tiny_folder), "--tokens", 1000, "--written", 2, "--out", str(out)]
    result = CliRunner().invoke(
        fewer_cells, [*map(str, arguments), "--methods", "kvzip,knorm:heads"]
    )
    assert result.exit_code == 0, result.output
    readings = json.loads(out.read_text())["readings"]
    assert [(reading["method"], reading["ratio"]) for reading in readings] == [
        ("none", 1.0),
        *((method, ratio) for ratio in (2.0, 4.0, 8.0) for method in ("kvzip", "knorm:heads")),
    ]
    for reading in readings:
        assert reading["cells"] == -(-1000 // reading["ratio"])
        assert reading["tokens_per_s"] > 0
        assert "4x" in result.output


def test_a_text_longer_than_the_trained_length_is_evaluated(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    tokens = config["max_position_embeddings"] + 100
    arguments = ["--model", tiny_folder, "--tokens", tokens, "--written", 1, "--methods", "knorm"]
    result = CliRunner().invoke(fewer_cells, [str(reading) for reading in arguments])
    assert result.exit_code == 0, result.output
    assert f"{tokens:,} cells" in result.output
