"""Comparison of two checkouts: ratios, the JSON file, and refused arguments."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.against import HERE, Figure, compare_rounds, main, measure, result_json, table
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json


def test_ratios_are_taken_within_a_round_and_above_1_is_faster() -> None:
    here = [{"save_s": s, "decode_tok_s": 100.0} for s in (1.0, 8.0, 2.0, 4.0, 16.0)]
    there = [{"save_s": s, "decode_tok_s": 50.0} for s in (1.0, 4.0, 4.0, 2.0, 64.0)]
    save, decode = compare_rounds(here, there)
    assert save == Figure("save_s", 4.0, 4.0, low=0.5, better=1.0, high=2.0)
    assert decode == Figure("decode_tok_s", 100.0, 50.0, low=2.0, better=2.0, high=2.0)
    assert "1.00x  0.50 to 2.00" in table([save])


def test_figures_can_be_written_as_json(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    write_json(out, result_json([Figure("save_s", 2.0, 4.0, 1.5, 2.0, 2.5)], rounds=3))
    written = json.loads(out.read_text())
    (figure,) = written["figures"]
    assert figure == {
        "name": "save_s", "here": 2.0, "there": 4.0, "low": 1.5, "better": 2.0, "high": 2.5,
    }  # fmt: skip
    assert written["machine"]["cores"] >= 1


def test_comparing_a_checkout_with_itself_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(HERE)])
    assert result.exit_code == 2
    assert "is this checkout" in result.output


def test_a_checkout_is_measured(smollm2: Model) -> None:
    figures = measure(HERE)
    assert {"prefill_tok_s", "decode_at_2048_tok_s", "save_s"} <= set(figures)
    assert min(figures.values()) > 0
