"""The benchmark of edits, at small sizes."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_models import small_model

from benchmarks import edits
from benchmarks.edits import Edits, Plan, measure_edits, scattered
from kvkeep.errors import InvalidArgument

MODEL = small_model()
IDS = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(600)]
PLAN = Plan(context=300, span=20, edits=8, drift_context=100, drift_tokens=6, decode=3, rounds=2)


@pytest.fixture(scope="module")
def measured() -> Edits:
    return measure_edits(MODEL, MODEL, IDS, PLAN, lambda count: None)


def test_drift_is_measured_after_none_one_some_and_all_of_the_edits(measured: Edits) -> None:
    assert [row.edits for row in measured.drift] == [0, 1, 2, 8]
    assert all(row.max_difference == 0 for row in measured.drift)  # both sides are one model


def test_each_edit_is_timed_against_its_context(measured: Edits) -> None:
    assert [row.tokens_evaluated for row in measured.costs] == [1, 21, 131, 171]
    for row in measured.costs:
        assert row.of_context == pytest.approx(row.seconds / measured.context_s, rel=2e-3)


def test_decode_is_timed_beside_the_number_of_segments(measured: Edits) -> None:
    untouched, edited = measured.decode
    assert (untouched.edits, edited.edits) == (0, 8)
    assert edited.segments > untouched.segments
    assert edited.median_ms > 0


def test_the_result_can_be_shown_and_written(measured: Edits) -> None:
    assert "insert, suffix" in edits.table(measured, PLAN)
    assert json.loads(json.dumps(dataclasses.asdict(measured)))["context_s"] > 0


def test_scattered_edits_are_the_same_on_every_session_of_equal_length() -> None:
    sessions = [MODEL.session(policy="full") for _ in range(2)]
    for session in sessions:
        session.feed(IDS[:100])
        assert list(scattered(session, 5, IDS)) == [1, 2, 3, 4, 5]
    assert sessions[0].tokens == sessions[1].tokens


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="this plan needs 380"):
        measure_edits(MODEL, MODEL, IDS[:300], PLAN, lambda count: None)


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    result = CliRunner().invoke(edits.edits, ["--out", str(tmp_path / "none" / "x.json")])
    assert result.exit_code == 2
    assert "cannot be written" in result.output
