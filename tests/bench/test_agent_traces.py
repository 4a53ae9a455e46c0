"""Sessions of five coding agents: how much of each prompt is evaluated, and to which bits."""

import pytest

from benchmarks.agent_clients import AGENTS
from benchmarks.agent_texts import Sizes
from benchmarks.agent_traces import MODES, random_model, run_trace, summary_table, turn_table
from kvkeep.model import Model

EXACT, _, IN_PLACE, *_ = MODES
SHORT = Sizes(instructions=900, project=150, file=120, tool=20, turns=5)
# Changes of what is far before the end of the prompt: exact reuse evaluates all behind them.
FAR = ("header", "tools", "cleared", "files", "summary")


@pytest.fixture(scope="module")
def model(smollm2: Model) -> Model:
    return random_model(smollm2)


@pytest.mark.parametrize("agent", AGENTS)
def test_exact_reuse_evaluates_little_but_the_new_text_and_changes_no_bit(
    model: Model, agent: str
) -> None:
    trace = run_trace(model, agent, EXACT, SHORT, check=True)
    assert "equal" in turn_table(trace)
    assert all(reading.equal for reading in trace)
    for reading in trace[1:]:
        if reading.change not in FAR:
            assert reading.evaluated <= 0.15 * reading.prompt
            assert reading.evaluated <= reading.new + 110  # measured: 103, with `Sizes()`


@pytest.mark.parametrize("agent", AGENTS)
def test_alignment_in_place_evaluates_little_whatever_changes(model: Model, agent: str) -> None:
    trace = run_trace(model, agent, IN_PLACE, SHORT, check=False)
    assert agent in summary_table(trace)
    for reading in trace[1:]:
        assert reading.evaluated <= reading.new + 60


def test_the_default_model_has_the_logits_of_a_cold_evaluation(smollm2: Model) -> None:
    """Its kernels, that is: a resumed answer, a prompt without reuse, and a part of one."""
    sizes = Sizes(instructions=400, project=100, file=100, tool=5, turns=4)
    trace = run_trace(smollm2, "opencode", EXACT, sizes, check=True)
    assert [reading.resumed for reading in trace] == [False, True, False, False]
    assert trace[-1].evaluated < 0.2 * trace[-1].prompt
    assert all(reading.equal for reading in trace)
