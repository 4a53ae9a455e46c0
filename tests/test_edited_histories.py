"""Exact reuse of edited histories changes no bit of an answer: see `tests.history_cases`."""

import pytest

from kvkeep.model import Model
from tests.history_cases import hybrid_model, run_case


@pytest.mark.parametrize(
    "states",
    ["delta_net", pytest.param("", marks=pytest.mark.extended, id="default")],
)
def test_answers_to_edited_histories_have_the_logits_of_a_cold_evaluation(
    smollm2: Model, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some cases of the many that `python -m tests.history_cases` runs."""
    model = hybrid_model(smollm2, states) if states else smollm2
    renderer = model.renderer
    monkeypatch.setattr(renderer, "output_format", renderer.output_format)  # to restore it
    renderer.choose_output_format("hermes")
    counts = [run_case(model, number, 4) for number in ((1, 2))]
    assert sum(reused for reused, _ in counts) > 0.2 * sum(total for _, total in counts)
