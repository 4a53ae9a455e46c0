"""Two checkouts in turn: what is made of their figures, and what cannot be measured."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.against import HERE, Figure, compared, main, result, table
from kvkeep.storage.files.atomic import write_json


def test_figures_are_compared_within_a_round_and_more_is_better_where_it_is() -> None:
    here = [{"save_s": s, "decode_tok_s": 100.0} for s in (1.0, 8.0, 2.0, 4.0, 16.0)]
    there = [{"save_s": s, "decode_tok_s": 50.0} for s in (1.0, 4.0, 4.0, 2.0, 64.0)]
    save, decode = compared(here, there)
    assert save == Figure("save_s", 4.0, 4.0, low=0.5, better=1.0, high=2.0)
    assert decode == Figure("decode_tok_s", 100.0, 50.0, low=2.0, better=2.0, high=2.0)
    assert "1.00x  0.50 to 2.00" in table([save])


def test_what_was_measured_can_be_written(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    write_json(out, result([Figure("save_s", 2.0, 4.0, 1.5, 2.0, 2.5)], rounds=3))
    found = json.loads(out.read_text())
    (figure,) = found["figures"]
    assert figure == {
        "name": "save_s", "here": 2.0, "there": 4.0, "low": 1.5, "better": 2.0, "high": 2.5,
    }  # fmt: skip
    assert found["machine"]["cores"] >= 1


def test_what_is_no_other_checkout_is_refused(tmp_path: Path) -> None:
    again = CliRunner().invoke(main, [str(HERE)])
    assert again.exit_code == 2
    assert "is this checkout" in again.output
