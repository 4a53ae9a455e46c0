"""Conversations in the form of OpenAI's Responses API."""

import json
from typing import Any

import pytest
from chat.chats import chats_with_custom_tools
from hypothesis import given, settings

from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from kvkeep.chat.openai_responses import format_chat, format_generated_call, parse_chat
from kvkeep.chat.openai_tools import client_types, custom_parameters, parse_tools
from kvkeep.chat.output import GeneratedCall
from kvkeep.errors import InvalidArgument
from tests.examples import examples

QUESTION = {"role": "user", "content": "Hi"}


def parsed(*items: Any, **fields: Any) -> tuple[Message, ...]:
    return parse_chat({"input": list(items), **fields}).messages


def assert_round_trip(chat: Chat) -> None:
    assert parse_chat(json.loads(json.dumps(format_chat(chat)))) == chat


@settings(max_examples=examples(30))
@given(chat=chats_with_custom_tools(namespaces=True))
def test_a_conversation_comes_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(chat=chats_with_custom_tools(namespaces=True))
def test_ten_thousand_conversations_come_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


def test_reasoning_a_message_and_its_calls_are_one_turn() -> None:
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "text"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "2"},
    ]
    assert parsed(QUESTION, *items) == (
        Message("user", (TextPart("Hi"),)),
        Message(
            "assistant",
            (
                ReasoningPart("Hm."),
                TextPart("A"),
                ToolCall("a", "f", {"x": 1}),
                ToolCall("b", "g", {"input": "text"}, "custom"),
            ),
        ),
        Message(
            "tool",
            (
                ToolResult("a", (TextPart("1"),)),
                ToolResult("b", (TextPart("2"),), kind="custom"),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("output", "content"),
    [
        ("A", (TextPart("A"),)),
        (None, ()),
        ([{"type": "input_text", "text": "A"}], (TextPart("A"),)),
        (
            [
                {"type": "input_text", "text": "A"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            ],
            (TextPart("A"), MediaPart("image")),
        ),
        ({"type": "computer_screenshot", "file_id": "file_1"}, (MediaPart("image", "file_1"),)),
        ({"a": None}, (TextPart('{"a": null}'),)),
        ([{"stdout": "x"}], (TextPart('[{"stdout": "x"}]'),)),
    ],
    ids=repr,
)
def test_results_are_text_parts_or_json(output: Any, content: tuple[Any, ...]) -> None:
    (message,) = parsed({"type": "function_call_output", "call_id": "a", "output": output})
    assert message.results == [ToolResult("a", content)]


@pytest.mark.parametrize(
    ("items", "name", "arguments", "result"),
    [
        (
            [
                {
                    "type": "local_shell_call",
                    "call_id": "a",
                    "action": {"type": "exec", "command": ["ls"], "user": None},
                },
                {"type": "local_shell_call_output", "id": "a", "output": "x"},
            ],
            "local_shell",
            {"command": ["ls"]},
            "x",
        ),
        (
            [
                {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "x"}]},
            ],
            "shell",
            {"commands": ["ls"]},
            '[{"stdout": "x"}]',
        ),
        (
            [
                {
                    "type": "apply_patch_call",
                    "call_id": "a",
                    "operation": {"type": "delete_file", "path": "p"},
                },
                {"type": "apply_patch_call_output", "call_id": "a", "status": "completed"},
            ],
            "apply_patch",
            {"type": "delete_file", "path": "p"},
            "",
        ),
        (
            [{"type": "mcp_call", "id": "a", "name": "f", "arguments": "{}", "output": "x"}],
            "f",
            {},
            "x",
        ),
        (
            [
                {
                    "type": "code_interpreter_call",
                    "id": "a",
                    "code": "1",
                    "outputs": [{"type": "logs", "logs": "1"}],
                }
            ],
            "code_interpreter",
            {"code": "1"},
            '[{"type": "logs", "logs": "1"}]',
        ),
    ],
    ids=lambda value: value[0]["type"] if isinstance(value, list) else None,
)
def test_calls_of_other_types(
    items: list[Any], name: str, arguments: dict[str, Any], result: str
) -> None:
    assistant, tool = parsed(*items)
    assert assistant.parts == (ToolCall("a", name, arguments),)
    assert tool.parts == (ToolResult("a", (TextPart(result),) if result else ()),)


@pytest.mark.parametrize(
    "item_type",
    ["web_search_call", "mcp_list_tools", "mcp_approval_request", "compaction", "hologram"],
)
def test_items_without_meaning_for_the_model_are_left_out(item_type: str) -> None:
    item = {"type": item_type, "id": "x", "status": "completed", "encrypted_content": "x"}
    assert parsed(item, QUESTION) == parsed(QUESTION)


def test_references_are_resolved() -> None:
    items = {"msg_1": {"type": "message", "role": "assistant", "content": "A"}}
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        chat = parse_chat({"input": [QUESTION, reference]}, items.get)
        assert chat.messages[1:] == (Message("assistant", (TextPart("A"),)),)
    with pytest.raises(InvalidArgument, match=r"input\[1\]: there is no stored item with id 'x'"):
        parsed(QUESTION, {"type": "item_reference", "id": "x"})


def test_missing_ids_are_generated_in_order() -> None:
    call = {"type": "function_call", "name": "f", "arguments": ""}
    result = {"type": "function_call_output", "output": "1"}
    assistant, tool = parsed(call, call, result, result)
    assert [part.id for part in assistant.calls] == ["call_0", "call_1"]
    assert [part.call_id for part in tool.results] == ["call_0", "call_1"]
    assert parsed(result)[0].results == [ToolResult("", (TextPart("1"),))]
    repeated = {**call, "call_id": "a"}
    results = parsed(repeated, repeated, result, result)[1].results
    assert [part.call_id for part in results] == ["a", "a"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_a_message_in_the_form_of_chats_is_read(field: str) -> None:
    (message,) = parsed({"role": "assistant", "content": "Yes.", field: "Hm."})
    assert message.parts == (ReasoningPart("Hm."), TextPart("Yes."))


def test_instructions_are_a_system_message() -> None:
    system = Message("system", (TextPart("Be brief."),))
    for instructions in ("Be brief.", [{"role": "developer", "content": "Be brief."}]):
        assert parsed(QUESTION, instructions=instructions)[0] == system
    assert parse_chat({"input": "Hi", "instructions": None}).messages == parsed(QUESTION)


def test_found_tools_are_callable_and_described_where_they_were_found() -> None:
    found = {
        "type": "namespace",
        "name": "n",
        "tools": [{"type": "function", "name": "f", "defer_loading": True}],
    }
    body = {
        "tools": [
            {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
            {"type": "function", "name": "g", "defer_loading": True},
        ],
        "input": [
            {"type": "tool_search_call", "call_id": "a", "arguments": {"query": "f"}},
            {"type": "tool_search_output", "call_id": "a", "tools": [found]},
        ],
    }
    chat = parse_chat(body)
    assert [(tool.name, tool.deferred) for tool in chat.tools] == [
        ("tool_search", False),
        ("g", True),
        ("n__f", True),
    ]
    assert chat.messages[0].parts == (ToolCall("a", "tool_search", {"query": "f"}),)
    assert '"name": "n__f"' in chat.messages[1].results[0].content[0].text  # type: ignore[union-attr]


def test_calls_are_given_back_in_the_form_of_their_tool() -> None:
    tools = (
        Tool("g", parameters=custom_parameters(), kind="custom"),
        Tool("n__f", namespace="n"),
    )
    common = {"call_id": "a", "status": "completed"}
    for name, arguments, item in (
        ("g", '{"input": "A\\nB"}', {"type": "custom_tool_call", "name": "g", "input": "A\nB"}),
        (
            "n__f",
            "{}",
            {"type": "function_call", "name": "f", "namespace": "n", "arguments": "{}"},
        ),
        ("f", "{}", {"type": "function_call", "name": "f", "arguments": "{}"}),
    ):
        assert format_generated_call(GeneratedCall("a", name, arguments), tools) == {
            **common,
            **item,
        }
    entries = [{"type": "local_shell"}]
    call = GeneratedCall("a", "local_shell", '{"command": ["ls"]}')
    assert format_generated_call(call, parse_tools(entries), client_types(entries)) == {
        **common,
        "type": "local_shell_call",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    }


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"type": "message", "role": "robot"}]}, "input[0].role"),
        ({"input": [{"content": "x" * 10_000}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": {"x": "x" * 10_000}}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": 5}]}, "input[0].name"),
        ({"instructions": 5}, "instructions"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].name"),
    ],
    ids=repr,
)
def test_errors_name_the_place_and_are_short(body: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_chat({"input": "Hi", **body})
    assert place in str(error.value)
    assert len(str(error.value)) < 400
