"""Spans that a compaction removes: all at once, with the result of one edit after another."""

import pytest
import torch
from session_state import differences, going_on, whole_state
from small_models import local_spec, small_model
from test_compaction import add_turn, text_of

from kvkeep import Model, Session
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.session.compaction_plan import PLACEHOLDER

MODEL = small_model()
SETTINGS: dict[str, tuple[Model, dict[str, object]]] = {
    "full": (MODEL, {"policy": "full"}),
    "quantised": (MODEL, {"policy": "full", "kv_bits": "4"}),
    "sliding": (MODEL, {"policy": "sliding", "keep": 4}),
    "shift": (MODEL, {"policy": "shift", "keep": 4}),
    "archive": (MODEL, {"policy": "archive", "method": "snapkv"}),
    "self_extend": (MODEL, {"policy": "self_extend", "group": 2, "window": 1000}),
    "local layers": (small_model(spec=local_spec()), {"policy": "full"}),
    "long local windows": (small_model(spec=local_spec(80)), {"policy": "full"}),
}


def agent_session(setting: str = "full") -> Session:
    """A session with six turns of a question, reasoning, a result and an answer."""
    model, settings = SETTINGS[setting]
    session = model.session(1000, **settings)  # type: ignore[arg-type]
    session.feed(text_of(0, 12))
    for turn in range(1, 7):
        add_turn(session, turn)
    return session


@pytest.mark.parametrize("is_last_pinned", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_spans_are_removed_as_by_one_edit_after_another(setting: str, is_last_pinned: bool) -> None:
    """To the bit: tokens, serials, cells with their places, pins, names and logits."""
    session = agent_session(setting)
    session.pin(200, 203)
    if is_last_pinned:
        session.pin(len(session.tokens) - 1, len(session.tokens))
    expected, counts = session.fork(), list[int]()
    report = session.compact(
        200, steps=("results", "reasoning"), keep_recent=1, keep_results=1, progress=counts.append
    )
    assert len(report.removed_results) > 2 < len(report.removed_reasoning)
    for name in report.removed_results:
        expected.replace(name, None, PLACEHOLDER)
    expected = expected.fork()  # each step of a compaction changes a fork
    for name in report.removed_reasoning:
        expected.delete(name)
    assert sum(counts) == report.tokens_evaluated
    assert not list(differences(whole_state(session), whole_state(expected)))
    assert not list(differences(going_on(session), going_on(expected)))


def test_the_last_token_is_evaluated_once_for_all_spans(monkeypatch) -> None:
    session, counts = agent_session(), list[int]()
    forward = Decoder.forward

    def counted(decoder: Decoder, tokens: torch.Tensor, step: AnyStep) -> torch.Tensor:
        counts.append(len(tokens))
        return forward(decoder, tokens, step)

    monkeypatch.setattr(Decoder, "forward", counted)
    report = session.compact(1, steps=("results",), keep_results=1, placeholder="")
    assert len(report.removed_results) == 5
    assert counts == [1]


def test_a_failed_evaluation_of_the_last_token_changes_nothing(monkeypatch) -> None:
    session = agent_session()
    before = whole_state(session)

    def interrupted(decoder: Decoder, tokens: torch.Tensor, step: AnyStep) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.compact(1, steps=("results",), placeholder="")
    assert not list(differences(whole_state(session), before))
    session.compact(1, steps=("results",), placeholder="")
