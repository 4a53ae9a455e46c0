"""Answers with default sampling do not end in loops: 20 questions in each kind of chat."""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from server.conftest import RunningServer

from kvkeep import Snapshot
from kvkeep.cli.main import main
from kvkeep.model import Model
from kvkeep.models.hub.library import home
from kvkeep.models.text.codec import TextCodec

pytestmark = pytest.mark.slow
LENGTH = 120  # tokens of an answer
QUESTIONS = (
    *("What is the capital of France?", "Write a short story about a lighthouse."),
    *("Explain photosynthesis.", "List ten animals.", "Give me a recipe for bread."),
    *("Write a poem about rain.", "What is 17 times 23?", "Translate 'good morning' to French."),
    *("Who wrote Hamlet?", "Describe a village by the sea.", "What is a hash table?"),
    *("Write a Python function that reverses a list.", "How do I fix a flat tyre?", "Tell a joke."),
    *("Why is the sky blue?", "Name five rivers.", "Summarise the water cycle."),
    *("What should I pack for a week in the mountains?", "Count from 1 to 30.", "Hello"),
)


def repeated(tokens: list[int]) -> list[int]:
    """Return 20 tokens that occur three times; none if there are no such."""
    counts = Counter(tuple(tokens[start : start + 20]) for start in range(len(tokens) - 19))
    return next((list(run) for run, count in counts.items() if count >= 3), [])


def describe_loops(codec: TextCodec, answers: dict[str, list[int]]) -> list[str]:
    """Describe the answers that repeat themselves. answers: the token ids for each question."""
    return [
        f"{question!r}: {codec.decode(run)!r} three times in {codec.decode(tokens)!r}"
        for question, tokens in answers.items()
        if (run := repeated(tokens))
    ]


def test_loops_are_found(smollm2: Model) -> None:
    assert repeated([*range(20)] * 3)
    assert not repeated([*range(20)] * 2 + [*range(19)])
    answers = {"Why?": [*range(100, 120)], "How?": [*range(100, 120)] * 3}
    (description,) = describe_loops(smollm2.text, answers)
    assert description.startswith("'How?'")


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("api", ["chat/completions", "turns"])
def test_answers_of_the_server_do_not_loop(
    server: RunningServer, smollm2: Model, api: str, seed: int
) -> None:
    """The web UI's chat takes turns in a session."""
    with server.client() as client:

        def complete(question: str) -> str:
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": LENGTH, "seed": seed}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, (question, response.text)
            return str(response.json()["choices"][0]["message"]["content"])

        def turn(question: str) -> str:
            name = client.post("/v1/sessions", json={}).json()["name"]
            body = {"content": question, "max_tokens": LENGTH, "seed": seed}
            response = client.post(f"/v1/sessions/{name}/turns", json=body)
            assert response.status_code == 200, (question, response.text)
            return str(response.json()["text"])

        ask: Callable[[str], str] = turn if api == "turns" else complete
        answers = {question: smollm2.text.encode(ask(question)) for question in QUESTIONS}
    assert describe_loops(smollm2.text, answers) == [], f"seed {seed}"


@pytest.mark.parametrize("seed", [1])
def test_answers_of_the_chat_command_do_not_loop(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In one chat of 20 turns."""
    (tmp_path / "models").symlink_to(home() / "models")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    options = ["chat", "--session", "s", "--seed", str(seed), "-n", str(LENGTH)]
    questions = "".join(f"{question}\n" for question in QUESTIONS)
    result = CliRunner().invoke(main, options, input=questions)
    if result.exit_code:
        trace = "".join(traceback.format_exception(result.exception))
        pytest.fail(f"exit code {result.exit_code}, seed {seed}\n{result.output}\n{trace}")
    session = smollm2.chat(snapshot=Snapshot.load(tmp_path / "sessions" / "s.kvkeep")).session
    answers = {
        question: session.tokens[slice(*session.span_ranges.get(f"turn {turn} answer", (0, 0)))]
        for turn, question in enumerate(QUESTIONS, 1)
    }
    assert [question for question, tokens in answers.items() if not tokens] == [], result.output
    assert sum(map(len, answers.values())) > 500, result.output
    assert describe_loops(smollm2.text, answers) == [], f"seed {seed}"
