"""The benchmark of edits in long sessions, at small sizes."""

import pytest
from small_models import small_model

from benchmarks.long_edits import Plan, measure_long_edits, table
from kvkeep.errors import InvalidArgument

MODEL = small_model()
IDS = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(900)]


def test_each_kind_of_edit_is_timed_under_both_policies() -> None:
    plan, read = Plan(cells=400, span=20, rounds=2), []
    measured = measure_long_edits(MODEL, IDS, plan, read.append)
    assert sum(read) == 400 + 450
    assert [(cost.policy, cost.what) for cost in measured] == [
        (policy, what) for policy in ("full", "sliding") for what in ("delete", "insert", "replace")
    ]
    for cost in measured:
        assert 0 < cost.median_ms <= cost.slowest_ms
        assert cost.next_token_ms > 0
    assert "sliding, replace" in table(measured, plan)


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="this plan needs 470"):
        measure_long_edits(MODEL, IDS[:460], Plan(cells=400, span=20), lambda count: None)
