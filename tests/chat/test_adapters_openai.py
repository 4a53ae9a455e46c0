"""Conversations in the form of OpenAI's Chat Completions API."""

import json
from typing import Any

import pytest
from chat.chats import chats_with_custom_tools
from hypothesis import given, settings

from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from kvkeep.chat.openai_chat import format_chat, format_output, parse_chat, parse_messages
from kvkeep.chat.openai_responses import parse_chat as parse_responses_chat
from kvkeep.chat.openai_tools import custom_parameters, hosted_tools, parse_choice, parse_tools
from kvkeep.chat.output import GeneratedCall, Output
from kvkeep.errors import InvalidArgument
from tests.examples import examples

LOCAL_IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def assert_round_trip(chat: Chat) -> None:
    assert parse_chat(json.loads(json.dumps(format_chat(chat)))) == chat


@settings(max_examples=examples(30))
@given(chat=chats_with_custom_tools())
def test_a_conversation_comes_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(chat=chats_with_custom_tools())
def test_ten_thousand_conversations_come_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ("{broken", {"": "{broken"}),
        ([1], {"": "[1]"}),
    ],
    ids=repr,
)
def test_arguments_are_an_object(arguments: Any, expected: dict[str, Any]) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message.calls[0].arguments == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "A"}, TextPart("A")),
        ({"type": "input_text", "text": "A"}, TextPart("A")),
        ({"type": "output_text", "text": "A", "annotations": []}, TextPart("A")),
        ({"text": "A"}, TextPart("A")),
        ({"type": "refusal", "refusal": "No."}, TextPart("No.")),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            MediaPart("image"),
        ),
        (
            {"type": "image_url", "image_url": {"url": "https://a.org/b.png"}},
            MediaPart("image", "https://a.org/b.png"),
        ),
        ({"type": "input_image", "image_url": "data:image/png;base64,AA"}, MediaPart("image")),
        ({"type": "input_audio", "input_audio": {"data": "A"}}, MediaPart("audio")),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:A"}},
            MediaPart("file", "a.pdf"),
        ),
        ({"type": "file", "file": {"file_id": "file-1"}}, MediaPart("file", "file-1")),
        ({"type": "hologram", "data": "A"}, TextPart("[hologram omitted]")),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) and "type" in value else None,
)
def test_content_parts(part: dict[str, Any], expected: Part) -> None:
    assert parse_messages([{"role": "user", "content": [part]}])[0].parts == (expected,)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_comes_from_the_fields_that_clients_use(field: str) -> None:
    (message,) = parse_messages([{"role": "assistant", "content": "A", field: "Hm."}])
    assert message.parts == (ReasoningPart("Hm."), TextPart("A"))


def test_a_refusal_or_speech_stands_in_place_of_content() -> None:
    for fields, part in (
        ({"refusal": "No."}, TextPart("No.")),
        ({"audio": {"id": "audio_1", "transcript": "Yes."}}, TextPart("Yes.")),
        ({"audio": {"id": "audio_1"}}, MediaPart("audio")),
    ):
        (message,) = parse_messages([{"role": "assistant", "content": None, **fields}])
        assert message.parts == (part,)


def test_missing_ids_are_generated_in_order_and_results_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("f", "g", "f")]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_call_id": "call_2", "content": "3"},
    ]
    assistant, tool = parse_messages(messages)
    assert [call.id for call in assistant.calls] == ["call_0", "call_1", "call_2"]
    assert [result.call_id for result in tool.results] == ["call_1", "call_0", "call_2"]


def test_results_without_ids_find_calls_of_repeated_ids() -> None:
    calls = [{"id": "a", "function": {"name": "f"}}, {"id": "a", "function": {"name": "g"}}]
    result = {"role": "tool", "content": "1"}
    messages = [{"role": "assistant", "tool_calls": calls}, result, result]
    assert [part.call_id for part in parse_messages(messages)[1].results] == ["a", "a"]


def test_deprecated_functions_are_tools() -> None:
    body = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "1"},
        ],
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
    }
    chat = parse_chat(body)
    assert chat.messages[1].parts == (ToolCall("call_0", "f", {}),)
    assert chat.messages[2].parts == (ToolResult("call_0", (TextPart("1"),)),)
    assert (chat.tools, chat.choice) == ((Tool("f"),), ToolChoice("required", ("f",)))
    assert parse_chat({**body, "function_call": "none"}).callable_tools == ()


def test_a_result_that_is_no_text_is_json_and_an_image_is_a_placeholder() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for content, parts in (
        ({"a": ["é", None]}, (TextPart('{"a": ["é", null]}'),)),
        ([{"a": 1}], (TextPart('[{"a": 1}]'),)),
        ([{"type": "text", "text": "A"}, image], (TextPart("A"), MediaPart("image"))),
        (None, ()),
    ):
        messages = [{"role": "tool", "tool_call_id": "a", "content": content}]
        assert parse_messages(messages)[0].results[0].content == parts


def test_developers_are_system_and_neighbours_are_merged() -> None:
    messages = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "C", "name": "Ann"},
    ]
    assert parse_messages(messages) == (
        Message("system", (TextPart("A\n\nB"),)),
        Message("user", (TextPart("C"),)),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", ("f",))),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",))),
        ({"type": "custom", "custom": {"name": "g"}}, ToolChoice("required", ("g",))),
        ({"type": "function", "name": "h", "namespace": "n"}, ToolChoice("required", ("n__h",))),
        ({"type": "function", "name": "h"}, ToolChoice("required", ("n__h",))),
        ({"type": "web_search"}, ToolChoice()),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            ToolChoice("required", ("f",)),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "g"}, {"type": "web_search"}],
            },
            ToolChoice("auto", ("g",)),
        ),
    ],
    ids=repr,
)
def test_tool_choices(choice: Any, expected: ToolChoice) -> None:
    tools = (
        Tool("f"),
        Tool("g", parameters=custom_parameters(), kind="custom"),
        Tool("n__h", namespace="n"),
    )
    assert parse_choice(choice, tools) == expected


def test_tools_of_all_kinds() -> None:
    entries = [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}},
        {"type": "function", "name": "g", "strict": True, "parameters": {"type": "object"}},
        {"type": "custom", "name": "h", "format": {"type": "grammar", "definition": "a: B"}},
        {
            "type": "namespace",
            "name": "mcp__x__",
            "tools": [{"type": "function", "name": "i"}, {"type": "custom", "name": "j"}],
        },
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x", "server_url": "https://a.org"},
        {"type": "local_shell"},
    ]
    tools = parse_tools(entries)
    assert [(tool.name, tool.kind, tool.namespace) for tool in tools] == [
        ("f", "function", ""),
        ("g", "function", ""),
        ("h", "custom", ""),
        ("mcp__x__i", "function", "mcp__x__"),
        ("mcp__x__j", "custom", "mcp__x__"),
        ("local_shell", "function", ""),
    ]
    assert "a: B" in tools[2].parameters["properties"]["input"]["description"]
    assert hosted_tools(entries) == ["web_search", "mcp"]


HOSTED = {"type": "web_search"}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        ("required", [HOSTED], ToolChoice()),
        ({"type": "required"}, [HOSTED], ToolChoice()),
        ("required", [HOSTED, FUNCTION], ToolChoice("required")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [HOSTED]},
            [HOSTED, FUNCTION],
            ToolChoice("auto", ()),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [HOSTED, FUNCTION]},
            [HOSTED, FUNCTION],
            ToolChoice("required", ("f",)),
        ),
        ("required", [], None),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}]},
            [HOSTED, FUNCTION],
            None,
        ),
    ],
    ids=repr,
)
def test_a_call_that_only_hosted_tools_could_answer_is_left_to_the_model(
    choice: Any, tools: list[Any], expected: ToolChoice | None
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    responses = {"input": "Hi", "tools": tools, "tool_choice": choice}
    for parse, fields in ((parse_chat, body), (parse_responses_chat, responses)):
        if expected is None:
            with pytest.raises(InvalidArgument, match="tool_choice"):
                parse(fields)
        else:
            assert parse(fields).choice == expected


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x" * 10_000}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ["x" * 10_000]}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL, {"function": 5}]}]},
            "messages[0].tool_calls[1].function",
        ),
        (
            {"messages": [{"role": "user", "content": [LOCAL_IMAGE]}]},
            "messages[0].content[0].image_url",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x" * 10_000}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
    ],
    ids=repr,
)
def test_errors_name_the_place_and_are_short(body: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_chat({"messages": [{"role": "user", "content": "Hi"}], **body})
    assert place in str(error.value)
    assert len(str(error.value)) < 400


def test_an_answer_is_a_message() -> None:
    call = GeneratedCall("a", "f", '{"x": 1}')
    output = Output((ReasoningPart("Hm."), TextPart("A"), call, TextPart("B")))
    assert format_output(output) == {
        "role": "assistant",
        "content": "AB",
        "reasoning_content": "Hm.",
        "tool_calls": [CALL],
    }
    assert format_output(Output((call,)))["content"] is None
    custom = GeneratedCall("a", "g", '{"input": "A\\nB"}')
    tool = Tool("g", parameters=custom_parameters(), kind="custom")
    assert format_output(Output((custom,)), [tool])["tool_calls"] == [
        {"id": "a", "type": "custom", "custom": {"name": "g", "input": "A\nB"}}
    ]
    assert format_output(Output()) == {"role": "assistant", "content": ""}
