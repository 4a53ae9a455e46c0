"""The benchmark of endless runs, at small sizes."""

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_models import small_model

from benchmarks import endless, endless_run
from benchmarks.endless_plot import draw_endless
from benchmarks.endless_run import Endless, Plan, measure_endless

MODEL = small_model()
PROMPT = list(range(1, 101))
PLAN = Plan(tokens=65, group=20, trace=10, young=40, pairs=20)


@pytest.fixture(scope="module", params=[1e-3, 1.0, 1e3], ids=lambda times: f"time x {times:g}")
def long_run(request: pytest.FixtureRequest) -> Iterator[Endless]:
    """Also as a machine that is a thousand times faster or slower would measure it."""
    with pytest.MonkeyPatch.context() as other:
        other.setattr(endless_run, "perf_counter", lambda: request.param * time.perf_counter())
        yield measure_endless(MODEL, PROMPT, PLAN, max_kv_size=32, keep=4)


def test_an_endless_run_stays_within_the_budget(long_run: Endless) -> None:
    assert long_run.max_kv_size == 32
    assert long_run.max_cells == 32
    assert long_run.kv_bytes == 32 * MODEL.session().cache.layout.cell_bytes
    assert all(moment.cells <= 32 for moment in long_run.trace)


def test_its_figures_agree_with_its_trace(long_run: Endless) -> None:
    assert (long_run.prompt_tokens, long_run.tokens, long_run.interrupted) == (100, 65, False)
    assert len(long_run.group_median_ms) == 3
    assert [m.tokens for m in long_run.trace] == [10, 20, 30, 40, 50, 60]
    assert long_run.ratio == pytest.approx(
        long_run.group_median_ms[2] / long_run.group_median_ms[1], rel=2e-3
    )
    assert long_run.slowest_ms >= max(m.slowest_ms for m in long_run.trace)
    assert long_run.rss_young_bytes == long_run.trace[3].rss_bytes
    assert long_run.tokens_per_s == pytest.approx(65 / long_run.seconds, rel=2e-3)


def test_the_old_session_is_compared_with_a_young_one_in_turn(long_run: Endless) -> None:
    paired = long_run.paired
    assert paired is not None
    assert (paired.young_tokens, paired.old_tokens, paired.pairs) == (40, 65, 20)
    assert paired.ratio == pytest.approx(paired.old_median_ms / paired.young_median_ms, rel=2e-3)


def test_its_result_and_picture_can_be_written(long_run: Endless) -> None:
    assert json.loads(json.dumps(dataclasses.asdict(long_run)))["max_cells"] == 32
    assert draw_endless(long_run, ".png").startswith(b"\x89PNG")


def test_an_interrupted_run_reports_what_there_is() -> None:
    written = 0

    def interrupt(count: int) -> None:
        nonlocal written
        written += count
        if written == 15:
            raise KeyboardInterrupt

    result = measure_endless(MODEL, PROMPT, PLAN, 32, 4, interrupt)
    assert result.interrupted
    assert result.tokens == 15
    assert result.ratio is None
    assert result.paired is None
    assert len(result.trace) == 1
    assert result.rss_end_bytes == result.trace[0].rss_bytes


def test_a_run_too_short_to_compare_says_so() -> None:
    result = measure_endless(MODEL, PROMPT, Plan(tokens=1), max_kv_size=32, keep=4)
    assert "too few tokens" in endless.table(result)
    assert result.rss_end_bytes > 0
    assert "0.990" in endless.table(replace(result, ratio=0.99))


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    output = CliRunner().invoke(endless.endless, ["--out", str(tmp_path / "none" / "x.json")])
    assert output.exit_code == 2
    assert "cannot be written" in output.output


def test_the_recurring_slowest_token_is_the_slowest_over_all_rounds() -> None:
    counted: list[int] = []
    plan = replace(PLAN, rounds=3)
    result = measure_endless(MODEL, PROMPT, plan, 32, 4, counted.append)
    assert sum(counted) == plan.steps == 65 * 3 + 40
    assert result.recurring_ms is not None
    assert 0 < result.recurring_ms <= result.slowest_ms
    assert result.fastest_median_ms is not None
    assert 0 < result.fastest_median_ms < result.median_ms
    assert result.recurring_to_median == pytest.approx(
        result.recurring_ms / result.fastest_median_ms, rel=2e-3
    )
    assert "slowest in 3 rounds" in endless.table(result)


def test_one_round_has_no_recurring_slowest_token(long_run: Endless) -> None:
    assert long_run.recurring_ms is None
    assert "rounds" not in endless.table(long_run)
