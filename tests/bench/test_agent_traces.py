"""Recorded sessions of coding agents: how much of each prompt is evaluated, and to which bits."""

import pytest

from benchmarks.agent_clients import load_shapes
from benchmarks.agent_traces import MODES, random_model, run_trace, summary_table, turn_table
from kvkeep.model import Model

SHAPES = load_shapes()
EXACT, ALL_RULES, IN_PLACE, *_ = MODES
SCALE = 0.05  # of the lengths of texts
FIRST = 9  # requests: a task with seven or so, and a second question in a new process
DAY = 16  # requests, by which the next day has come
BEFORE_LAST_STEP = 128 + 32  # tokens that steps and a dropped reasoning cost beside new text


@pytest.fixture(scope="module")
def model(smollm2: Model) -> Model:
    return random_model(smollm2)


@pytest.mark.parametrize("agent", SHAPES)
def test_exact_reuse_changes_no_bit_and_evaluates_little_but_the_new_text(
    model: Model, agent: str
) -> None:
    trace = run_trace(model, SHAPES[agent], EXACT, SCALE, check=True, limit=FIRST)
    assert "equal" in turn_table(trace)
    assert all(reading.equal for reading in trace)
    if agent != "aider":  # which moves its files behind each answer
        for reading in (r for r in trace if r.is_later):
            assert reading.evaluated <= reading.new + BEFORE_LAST_STEP


@pytest.mark.parametrize("agent", ["Claude Code", "opencode"])
def test_a_new_day_costs_little_where_the_date_is_behind_the_last_message(
    model: Model, agent: str
) -> None:
    trace = run_trace(model, SHAPES[agent], ALL_RULES, SCALE, limit=DAY)
    (day,) = [reading for reading in trace if reading.event == "day"]
    assert day.evaluated <= day.new + BEFORE_LAST_STEP


def test_alignment_in_place_evaluates_little_whatever_changes(model: Model) -> None:
    trace = run_trace(model, SHAPES["aider"], IN_PLACE, SCALE, limit=FIRST)
    assert "aider" in summary_table(trace)
    for reading in (r for r in trace if r.is_later):
        assert reading.evaluated <= reading.new + BEFORE_LAST_STEP


def test_the_default_model_has_the_logits_of_a_cold_evaluation(smollm2: Model) -> None:
    """Its kernels, that is."""
    trace = run_trace(smollm2, SHAPES["opencode"], EXACT, 0.04, check=True, limit=5)
    assert trace[-1].evaluated < 0.5 * trace[-1].prompt
    assert all(reading.equal for reading in trace)
