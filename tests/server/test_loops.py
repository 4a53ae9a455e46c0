"""Answers with default sampling do not end in loops: 20 questions in each kind of chat."""

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


def has_loop(tokens: list[int]) -> bool:
    """Whether the same 20 tokens occur three times."""
    counts = Counter(tuple(tokens[start : start + 20]) for start in range(len(tokens) - 19))
    return max(counts.values(), default=0) >= 3


def test_loops_are_found() -> None:
    assert has_loop([*range(20)] * 3)
    assert not has_loop([*range(20)] * 2 + [*range(19)])


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
            response = client.post("/v1/chat/completions", json=body).json()
            return str(response["choices"][0]["message"]["content"])

        def turn(question: str) -> str:
            name = client.post("/v1/sessions", json={}).json()["name"]
            body = {"content": question, "max_tokens": LENGTH, "seed": seed}
            return str(client.post(f"/v1/sessions/{name}/turns", json=body).json()["text"])

        ask: Callable[[str], str] = turn if api == "turns" else complete
        answers = {question: ask(question) for question in QUESTIONS}
    assert [q for q, answer in answers.items() if has_loop(smollm2.text.encode(answer))] == []


@pytest.mark.parametrize("seed", [1])
def test_answers_of_the_chat_command_do_not_loop(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In one chat of 20 turns."""
    (tmp_path / "models").symlink_to(home() / "models")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    options = ["chat", "--session", "s", "--seed", str(seed), "-n", str(LENGTH)]
    questions = "".join(f"{question}\n" for question in QUESTIONS)
    output = CliRunner().invoke(main, options, input=questions)
    assert output.exit_code == 0, output.output
    session = smollm2.chat(snapshot=Snapshot.load(tmp_path / "sessions" / "s.kvkeep")).session
    spans = session.span_ranges
    answers = {turn: spans[f"turn {turn} answer"] for turn in range(1, len(QUESTIONS) + 1)}
    assert sum(end - start for start, end in answers.values()) > 500
    looped = [n for n, (start, end) in answers.items() if has_loop(list(session.tokens[start:end]))]
    assert looped == []
