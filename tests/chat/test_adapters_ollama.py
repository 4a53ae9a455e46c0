"""Conversations in Ollama's form."""

import json
from dataclasses import replace
from typing import Any

import pytest
from chat.chats import chats
from hypothesis import given, settings

from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolResult,
    normalized,
)
from kvkeep.chat.ollama_chat import format_messages, format_tools, parse_chat
from kvkeep.errors import InvalidArgument
from tests.examples import examples

QUESTION = {"role": "user", "content": "Hi"}


def expressible(chat: Chat) -> Chat:
    """Return the part of a conversation that the API can express; see the module's docstring."""

    def reordered(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        kinds = (ReasoningPart, MediaPart, TextPart, ToolCall, ToolResult)
        ordered = sorted(map(without_loss, parts), key=lambda part: kinds.index(type(part)))
        return normalized([Message("user", tuple(ordered))])[0].parts

    def without_loss(part: Part) -> Part:
        if isinstance(part, MediaPart):
            is_image = part.kind == "image"
            return MediaPart("image") if is_image else TextPart(part.placeholder)
        if isinstance(part, ToolResult):
            content: Any = reordered(part.content)
            return ToolResult(part.call_id, content)
        return part

    messages = tuple(replace(message, parts=reordered(message.parts)) for message in chat.messages)
    return Chat(messages, chat.tools)


def assert_round_trip(chat: Chat) -> None:
    body = json.loads(json.dumps([format_messages(chat.messages), format_tools(chat.tools)]))
    assert parse_chat(*body) == expressible(chat)


@settings(max_examples=examples(30))
@given(chat=chats())
def test_a_conversation_comes_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(chat=chats())
def test_ten_thousand_conversations_come_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


def test_results_without_ids_are_tied_to_calls_by_name_and_then_by_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2", "tool_name": "a"},
        {"role": "tool", "content": "3"},
    ]
    chat = parse_chat(
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    )
    _, made, answered = chat.messages
    ids = [call.id for call in made.calls]
    assert len(set(ids)) == 3
    contents = {result.call_id: result.content for result in answered.results}
    assert [contents[call_id] for call_id in ids] == [
        (TextPart("2"),),
        (TextPart("1"),),
        (TextPart("3"),),
    ]


def test_images_are_placeholders_before_the_text() -> None:
    (message,) = parse_chat([{**QUESTION, "images": ["iVBORw0KGgo="]}]).messages
    assert message.parts == (MediaPart("image"), TextPart("Hi"))


@pytest.mark.parametrize(
    ("messages", "tools", "place"),
    [
        ([], None, "messages"),
        (["a"], None, r"messages\[0\]\.role"),
        ([{"role": "robot"}], None, r"messages\[0\]\.role"),
        ([{"role": ["user"]}], None, r"messages\[0\]\.role"),
        ([{"role": "user", "content": 5}], None, r"messages\[0\]\.content"),
        ([{"role": "user", "images": "a"}], None, r"messages\[0\]\.images"),
        (
            [{"role": "assistant", "tool_calls": [5]}],
            None,
            r"messages\[0\]\.tool_calls\[0\]\.function",
        ),
        ([QUESTION], [{"type": "function"}], r"tools\[0\]\.name"),
        ([QUESTION], [{"function": {"name": "no good"}}], r"tools\[0\]\.function\.name"),
    ],
    ids=repr,
)
def test_errors_name_the_place(messages: Any, tools: Any, place: str) -> None:
    with pytest.raises(InvalidArgument, match=place):
        parse_chat(messages, tools)


def test_results_of_repeated_ids_have_the_names_of_their_calls() -> None:
    calls = [{"id": "a", "function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    contents = [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("1", "2")]
    turn = [{"role": "assistant", "tool_calls": calls}, *contents]
    messages = format_messages(parse_chat([QUESTION, *turn, *turn]).messages)
    names = [message["tool_name"] for message in messages if message["role"] == "tool"]
    assert names == ["f", "g", "f", "g"]
