"""Answers of reasoning models in a `Conversation`, in turns of a session, and in `kvkeep chat`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import Sampling
from kvkeep.chat.output import OutputEvent, ReasoningDelta, TextDelta, joined_output
from kvkeep.chat.quoted_reasoning import QuotedReasoning
from kvkeep.cli.main import main
from kvkeep.client import Client
from kvkeep.model import Model
from tests.chat.test_families import SIGNS
from tests.scripted_model import ScriptedConstraint, ScriptedEngine, family_model
from tests.server.conftest import RunningServer, serving

REASONING, TEXT = "Let me see.\nFrance.", "Paris,\n\nof course."
HARMONY_MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")


@dataclass(frozen=True)
class Form:
    """How a family writes an answer. markers: its control tokens."""

    written: str
    markers: tuple[str, ...] = ()


FORMS = {
    "hermes": Form(f"<think>\n{REASONING}\n</think>\n\n{TEXT}"),
    "mistral": Form(f"[THINK]{REASONING}[/THINK]{TEXT}", ("[THINK]", "[/THINK]")),
    "harmony": Form(
        f"<|channel|>analysis<|message|>{REASONING}<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{TEXT}",
        HARMONY_MARKERS,
    ),
}


@pytest.fixture(params=FORMS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(family: str, tmp_path: Path) -> Model:
    return family_model(tmp_path / "model", FORMS[family].markers, SIGNS[family])


@pytest.fixture
def server(family: str, model: Model) -> Iterator[RunningServer]:
    engine = ScriptedEngine(
        model, lambda _: FORMS[family].written, settings={"max_kv_size": 1024, "policy": "full"}
    )
    with serving(engine) as running:
        yield running


def sampling(model: Model, written: str) -> Sampling:
    ids = model.text.encode(written, special=True)
    return Sampling(constraint=ScriptedConstraint([*ids, model.end_token_ids[0]], None))


def test_a_conversation_yields_text_and_has_the_reasoning_as_events(
    family: str, model: Model
) -> None:
    written = FORMS[family].written
    chat = model.chat(max_kv_size=1024, policy="full")
    assert "".join(chat.stream("Which city?", sampling=sampling(model, written))) == TEXT
    assert chat.say("And again?", sampling=sampling(model, written)) == TEXT
    events = list(chat.events("Once more?", sampling=sampling(model, written)))
    assert (joined_output(events).reasoning, joined_output(events).text) == (REASONING, TEXT)
    assert len(events) > 3
    assert QuotedReasoning().push(events) == "> Let me see.\n> France.\n\nParis,\n\nof course."
    assert chat.turns == [1, 2, 3]


def test_an_answer_that_is_cut_off_keeps_its_reasoning(family: str, model: Model) -> None:
    chat = model.chat(max_kv_size=1024, policy="full")
    events = list(chat.events("Which?", 16, sampling(model, FORMS[family].written)))
    output = joined_output(events)
    assert REASONING.startswith(output.reasoning)
    assert output.text == ""


def test_turns_of_a_session_have_text_and_reasoning(server: RunningServer) -> None:
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        whole = client.post("/v1/sessions/a/turns", json={"content": "Which?"}).json()
        assert (whole["text"], whole["reasoning"]) == (TEXT, REASONING)
    events = list(Client(server.url).session("a").stream_turn("Again?"))
    tokens = [event for kind, event in events if kind == "token"]
    assert "".join(event["text"] for event in tokens) == TEXT
    assert "".join(event.get("reasoning", "") for event in tokens) == REASONING
    assert events[-1][1]["text"] == TEXT


def test_a_chat_quotes_the_reasoning(server: RunningServer) -> None:
    result = CliRunner().invoke(main, ["chat", "--server", server.url, "-q"], input="Which city?\n")
    assert result.exit_code == 0, result.output
    assert "> Let me see.\n> France.\n\nParis,\n\nof course." in result.stdout


def split_texts(kind: type[TextDelta] | type[ReasoningDelta]) -> st.SearchStrategy[OutputEvent]:
    return st.text("a >\n", max_size=6).map(kind)


@given(
    st.lists(st.one_of(split_texts(TextDelta), split_texts(ReasoningDelta)), max_size=6),
    st.data(),
)
def test_quoted_reasoning_does_not_depend_on_the_events(
    events: list[OutputEvent], data: st.DataObject
) -> None:
    divided: list[OutputEvent] = []
    for event in events:
        assert isinstance(event, (TextDelta, ReasoningDelta))
        cut = data.draw(st.integers(0, len(event.text)))
        divided += [type(event)(event.text[:cut]), type(event)(event.text[cut:])]
    display = QuotedReasoning()
    assert "".join(display.push([event]) for event in divided) == QuotedReasoning().push(events)
