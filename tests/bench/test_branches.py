"""The benchmark of groups: rounds and their summary."""

import pytest
from small_models import small_model

from benchmarks.branches import Round, measure_branches, summarise, table

MODEL = small_model()


def test_branches_are_measured_both_ways() -> None:
    prompt, endings = list(range(1, 101)), [[1, 2], [3, 4], [5, 6]]
    progress: list[int] = []
    rounds = list(measure_branches(MODEL, prompt, endings, 5, 2, progress.append))
    assert len(rounds) == 2
    assert progress == [15] * 6
    cell = MODEL.decoder.new_cache().layout.cell_bytes
    for round_ in rounds:
        assert round_.group_s > 0
        assert round_.alone_s > 0
        assert round_.same == 3
        # Storage grows in pieces.
        assert (2 + 5) * cell <= round_.branch_bytes < 1000 * cell


def test_rounds_are_summarised_by_their_medians() -> None:
    rounds = [
        Round(1.0, 4.0, 16, 5_000_000),
        Round(2.0, 9.0, 15, 5_000_000),
        Round(1.0, 5.0, 16, 6),
    ]
    summary = summarise(rounds, branches=16, tokens=10, prompt_bytes=46_000_000)
    assert summary.ratio == 4.5
    assert summary.group_tokens_per_s.median == pytest.approx(160)
    assert summary.alone_tokens_per_s.most == pytest.approx(40)
    assert summary.group_step_ms.median == pytest.approx(100)
    assert (summary.same, summary.branch_bytes) == (15, 5_000_000)
    assert "160.0 (80.0 to 160.0) tokens/s" in table(summary)
    assert "46.0 MB for the prompt, once; 5.0 MB for each branch" in table(summary)
