"""With `tool_choice` "none" the prompt stays the same, and no call begins."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.output_format import OutputFormat
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.server import no_calls
from kvkeep.server.no_calls import CallsForbidden
from tests.server.conftest import RunningServer

TAG = "<tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
QUESTION = [{"role": "user", "content": "What is the weather in Cologne? " * 20}]
OPENAI: dict[str, Any] = {
    "messages": QUESTION,
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 2,
}
RESPONSE: dict[str, Any] = {
    "input": QUESTION,
    "tools": [{"type": "function", **FUNCTION}],
    "max_output_tokens": 2,
    "store": False,
}
MESSAGE: dict[str, Any] = {
    "messages": QUESTION,
    "tools": [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}],
    "max_tokens": 2,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


def prompt_and_reused(server: RunningServer, path: str, body: Any, choice: Any) -> tuple[int, int]:
    with server.client() as client:
        response = client.post(path, json={**body, "tool_choice": choice})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is not None:
        return usage.get("prompt_tokens") or usage["input_tokens"], details["cached_tokens"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage[
        "cache_read_input_tokens"
    ]


@pytest.mark.parametrize(
    ("path", "body", "auto", "others"),
    [
        ("/v1/chat/completions", OPENAI, "auto", ["none", "required", NAMED]),
        ("/v1/responses", RESPONSE, "auto", ["none", "required"]),
        ("/v1/messages", MESSAGE, {"type": "auto"}, [{"type": "none"}, {"type": "any"}]),
    ],
)
def test_another_choice_of_tools_has_the_same_prompt(
    server: RunningServer, path: str, body: Any, auto: Any, others: list[Any]
) -> None:
    length, _ = prompt_and_reused(server, path, body, auto)
    assert length > 200
    for choice in others:
        again, reused = prompt_and_reused(server, path, body, choice)
        assert again == length
        assert reused >= length - 128


def test_the_vocabulary_is_searched_outside_of_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_event_loop: list[bool] = []
    endings = no_calls._endings

    def searched(codec: TextCodec, tag: str) -> Mapping[int, Sequence[int]]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            in_event_loop.append(False)
        else:
            in_event_loop.append(True)
        return endings(codec, tag)

    monkeypatch.setattr(no_calls, "_endings", searched)
    prompt_and_reused(server, "/v1/chat/completions", OPENAI, "none")
    assert in_event_loop == [False]


class CountedText(str):
    """A text that counts its comparisons with the ends of a tag."""

    count: ClassVar[int] = 0

    def startswith(self, *arguments: Any) -> bool:
        CountedText.count += 1
        return super().startswith(*arguments)


def test_the_tokens_that_complete_a_tag_are_found_among_those_with_its_last_character(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = {
        **smollm2.text.tokenizer.get_vocab(with_added_tokens=True),
        **{
            text: 10**6 + n for n, text in enumerate([TAG, f"a{TAG}b", "ol_call> x", "_call>", ">"])
        },
    }
    expected = {
        length: [i for text, i in vocabulary.items() if text.startswith(TAG[length:])]
        for length in range(1, len(TAG))
    }
    expected[0] = [i for text, i in vocabulary.items() if TAG in text]

    class Vocabulary:
        def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
            assert with_added_tokens
            return {CountedText(text): i for text, i in vocabulary.items()}

    class Codec:
        tokenizer = Vocabulary()

    monkeypatch.setattr(CountedText, "count", 0)
    assert no_calls._endings(cast("TextCodec", Codec()), TAG) == expected
    assert CountedText.count == sum(TAG[-1] in text for text in vocabulary) * (len(TAG) - 1)


@st.composite
def splits(draw: st.DrawFn) -> list[str]:
    """Return a tag, perhaps in a text, in pieces."""
    text = draw(st.sampled_from(["", "a ", "<", "<tool_", "x<tool_call"])) + TAG
    places = sorted(draw(st.sets(st.integers(1, len(text) - 1))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(pieces=splits())
def test_a_tag_is_not_written_in_whatever_tokens(smollm2: Model, pieces: list[str]) -> None:
    """All tokens but the one that completes the tag are allowed."""
    codec = smollm2.text
    ids = [token for piece in pieces for token in codec.encode(piece)]
    constraint = CallsForbidden(codec, format_by_name("hermes"), None)
    logits, text = torch.zeros(smollm2.spec.vocab_size), ""
    for token in ids:
        text += codec.token_bytes(token).decode()
        allowed = bool(constraint.masked(logits)[token] == 0)
        assert allowed == (TAG not in text)
        if not allowed:
            return
        constraint.accept(token)
    raise AssertionError("the tag was written")


def test_a_marker_that_is_a_control_token_is_not_sampled(smollm2: Model) -> None:
    """The constraint within holds as well, and no logits are modified."""
    codec = smollm2.text
    marker = codec.encode("<|im_start|>", special=True)[0]
    form = replace(TAGGED, opener="<|im_start|>")
    output_format = OutputFormat("x", calls=(form,), control_markers=frozenset(["<|im_start|>"]))
    within = CallsForbidden(codec, format_by_name("hermes"), None)
    constraint = CallsForbidden(codec, output_format, within)
    logits = torch.zeros(smollm2.spec.vocab_size)
    for token in codec.encode("<tool_call"):
        constraint.accept(token)
    masked = constraint.masked(logits)
    assert masked[[marker, codec.encode(">")[0]]].isneginf().all()
    assert logits.eq(0).all()
    assert not constraint.complete
