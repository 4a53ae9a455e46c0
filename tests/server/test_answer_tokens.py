"""The tokens of an answer's text and reasoning, however the answer is divided into tokens."""

from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.chat.messages import Tool
from kvkeep.chat.output import ReasoningDelta, TextDelta
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken
from kvkeep.server.answer_tokens import AnswerTokens
from tests.server.conftest import ScriptedServer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "Hm."}}\n</tool_call>'
REASONING = ["Hm.", "a <b", "think"]
TEXTS = ["Hm.", "think </", "two\n\nparts", "é ✓"]


def attributed(tokens: list[GeneratedToken]) -> tuple[str, str, list[Any], list[Any], int]:
    """Return text and reasoning of an answer, and the tokens of each."""
    answer = AnswerTokens(OutputReader(format_by_name("hermes", ()), [Tool("f")]))
    usage: Any = None  # which nothing here reads
    finished = Finished("eos", "", usage)
    parts = [part for token in tokens for part in answer.push(token)] + answer.push(finished)
    texts = [(event, tokens) for event, tokens in parts if isinstance(event, TextDelta)]
    thoughts = [(event, tokens) for event, tokens in parts if isinstance(event, ReasoningDelta)]
    return (
        "".join(event.text for event, _ in texts),
        "".join(event.text for event, _ in thoughts),
        [token for _, tokens in texts for token in tokens],
        [token for _, tokens in thoughts for token in tokens],
        answer.reasoning_tokens,
    )


def as_tokens(pieces: list[str]) -> list[GeneratedToken]:
    return [GeneratedToken(index, text, pieces=[text]) for index, text in enumerate(pieces)]


@given(
    reasoning=st.sampled_from(REASONING),
    space=st.sampled_from(["", "\n\n", " "]),
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    with_call=st.booleans(),
)
def test_characters_of_text_and_reasoning_are_attributed(
    reasoning: str, space: str, texts: list[str], with_call: bool
) -> None:
    answer = f"<think>{space}{reasoning}{space}</think>{space}" + " ".join(texts)
    answer += f"\n{CALL}" if with_call else ""
    text, thoughts, of_text, of_reasoning, count = attributed(as_tokens([*answer]))
    assert "".join(token.text for token in of_text) == text
    assert "".join(token.text for token in of_reasoning) == thoughts
    assert count == len(of_reasoning)


@given(cuts=st.lists(st.integers(1, 90), max_size=20))
def test_tokens_are_of_the_first_part_that_they_wrote(cuts: list[int]) -> None:
    answer = f"<think>Hm.</think>\n\nHm. Let me see.\n{CALL}"
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    pairs = pairwise(places)
    _, _, of_text, of_reasoning, _ = attributed(as_tokens([answer[a:b] for a, b in pairs]))
    start, end = answer.index("Hm. Let"), answer.index("\n<tool_call>")
    reasoning = answer.index("Hm."), answer.index("</think>")
    expected_text, expected_reasoning = list[int](), list[int]()
    for index, (first, last) in enumerate(pairwise(places)):
        if first < reasoning[1] and last > reasoning[0]:
            expected_reasoning.append(index)
        elif first < end and last > start:
            expected_text.append(index)
    assert [token.token for token in of_reasoning] == expected_reasoning
    assert [token.token for token in of_text] == expected_text


def test_parts_of_a_character_are_of_the_token_that_ends_it() -> None:
    tokens = [GeneratedToken(0, "", pieces=[]), GeneratedToken(1, "é", pieces=["é"])]
    assert attributed(tokens)[2] == tokens


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/api/chat", "messages")],
)
def test_log_probabilities_are_those_of_the_content(
    scripted: ScriptedServer, path: str, field: str
) -> None:
    scripted.write("<think>\nHm, a thought.\n</think>\n\nThe answer.")
    include = ["message.output_text.logprobs"]
    body: dict[str, Any] = {field: [{"role": "user", "content": "Hi"}], "stream": False}
    body |= {"logprobs": True} if field == "messages" else {"include": include}
    with scripted.client() as client:
        answer = post(client, path, body)
    if path == "/v1/chat/completions":
        entries = answer["choices"][0]["logprobs"]["content"]
        details = answer["usage"]["completion_tokens_details"]
    elif path == "/v1/responses":
        entries = answer["output"][-1]["content"][0]["logprobs"]
        details = answer["usage"]["output_tokens_details"]
    else:
        entries, details = answer["logprobs"], None
    assert "".join(entry["token"] for entry in entries) == "The answer."
    assert details is None or 3 <= details["reasoning_tokens"] <= 6


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answer
