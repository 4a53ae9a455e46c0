"""Conversations in Anthropic's form."""

import json
from contextlib import suppress
from typing import Any

import pytest
from chat.chats import JSON_VALUES, chats
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.chat.anthropic_blocks import unknown_types
from kvkeep.chat.anthropic_messages import (
    format_chat,
    format_output,
    parse_chat,
)
from kvkeep.chat.anthropic_tools import hosted_tools
from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from kvkeep.chat.output import GeneratedCall, Output
from kvkeep.errors import InvalidArgument
from tests.examples import examples

TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}

ANSWER = {"role": "assistant"}
LOCAL_IMAGE = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}


def parsed(*messages: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return parse_chat({"messages": list(messages), **fields}).messages


def user_parts(*blocks: dict[str, Any], **fields: Any) -> tuple[Any, ...]:
    """The parts of a user's message of these blocks."""
    (message,) = parsed({"role": "user", "content": list(blocks)}, **fields)
    return message.parts


def assert_round_trip(chat: Chat) -> None:
    body = json.loads(json.dumps(format_chat(chat)))
    assert parse_chat(body) == chat


@settings(max_examples=examples(30))
@given(chat=chats())
def test_a_conversation_comes_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(chat=chats())
def test_ten_thousand_conversations_come_back_the_same(chat: Chat) -> None:
    assert_round_trip(chat)


def test_audio_and_video_come_back_as_text() -> None:
    chat = Chat((Message("user", (MediaPart("audio", "a.mp3"), TextPart("?"))),))
    (message,) = parse_chat(format_chat(chat)).messages
    assert message.parts == (TextPart("[audio a.mp3 omitted]?"),)


def test_a_results_message_becomes_the_results_and_then_the_text() -> None:
    calls = [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}]
    results = [
        {"type": "text", "text": "Here:"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain", "is_error": True},
    ]
    assert parsed(
        {"role": "assistant", "content": calls}, {"role": "user", "content": results}
    ) == (
        Message("assistant", (ToolCall("toolu_1", "weather", {"city": "Rome"}),)),
        Message("tool", (ToolResult("toolu_1", (TextPart("Rain"),), is_error=True),)),
        Message("user", (TextPart("Here:"),)),
    )


@pytest.mark.parametrize(
    "content",
    [None, "", [], [{"type": "text", "text": ""}], [{"type": "redacted_thinking", "data": "x"}]],
    ids=repr,
)
def test_a_message_without_content_stays_a_turn(content: Any) -> None:
    question = {"role": "user", "content": "Hi"}
    _, empty, _ = parsed(question, {"role": "assistant", "content": content}, question)
    assert empty == Message("assistant")


def test_a_message_of_thinking_alone_stays() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    _, message = parsed(
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": [thinking]}
    )
    assert message == Message("assistant", (ReasoningPart("Hm."),))


def test_system_is_text_or_blocks_and_may_come_later() -> None:
    later = {"role": "system", "content": "Be kind."}
    question = {"role": "user", "content": "Hi"}
    for system in ("Be brief.", [{"type": "text", "text": "Be "}, {"text": "brief."}]):
        messages = parsed(question, later, system=system)
        assert [(message.role, message.text) for message in messages] == [
            ("system", "Be brief."),
            ("user", "Hi"),
            ("system", "Be kind."),
        ]
    assert [message.role for message in parsed(question, system="")] == ["user"]


def test_a_system_message_that_clears_itself_is_there_for_one_turn() -> None:
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    note = {"role": "system", "content": "Be kind.", "clear_at": "next_user_message"}
    roles = [message.role for message in parsed(question, note, answer)]
    assert roles == ["user", "system", "assistant"]
    assert parsed(question, note, answer, question) == parsed(question, answer, question)
    stays = {**note, "clear_at": "never"}
    assert "system" in {message.role for message in parsed(question, stays, answer, question)}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}
    changing = {**note, "content": [{"type": "text", "text": "Be kind."}, removal]}
    chat = parse_chat({"messages": [question, changing, question], "tools": [TOOL]})
    assert "Be kind." not in chat.messages[1].text
    assert "weather" in chat.messages[1].text
    assert chat.callable_tools == ()


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}},
            MediaPart("image"),
        ),
        ({"type": "image", "source": {}}, MediaPart("image")),
        (
            {"type": "image", "source": {"type": "url", "url": "https://a.org/b.png"}},
            MediaPart("image", "https://a.org/b.png"),
        ),
        (
            {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "A"}},
            MediaPart("file", "a.pdf"),
        ),
        (
            {"type": "document", "title": "a", "source": {"type": "text", "data": "One."}},
            TextPart('<document title="a">\nOne.\n</document>\n'),
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [{"text": "One."}]}},
            TextPart("<document>\nOne.\n</document>\n"),
        ),
        (
            {
                "type": "search_result",
                "source": "https://a.org",
                "title": "A & B",
                "content": [{"type": "text", "text": "Found."}],
            },
            TextPart(
                '<search_result title="A &amp; B" source="https://a.org">\nFound.\n'
                "</search_result>\n"
            ),
        ),
        ({"type": "container_upload", "file_id": "file_1"}, MediaPart("file", "file_1")),
        ({"type": "compaction", "content": "So far."}, TextPart("So far.")),
        ({"type": "of_next_year", "x": 1}, TextPart("[of_next_year omitted]")),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_other_blocks_are_inlined_or_placeholders(block: dict[str, Any], part: Any) -> None:
    assert user_parts(block) == (part,)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    (message,) = parsed({"role": "user", "content": [result]})
    assert message.results[0].content == (part,)


@pytest.mark.parametrize("kind", ["fallback", "mcp_tool_listing", "of_next_year"])
def test_what_only_the_hosted_api_reads_is_none_of_the_models_words(kind: str) -> None:
    text = {"type": "text", "text": "Hello"}
    blocks = [{"type": kind, "x": 1}, text]
    assert parsed({"role": "assistant", "content": blocks}) == (
        Message("assistant", (TextPart("Hello"),)),
    )


def test_unknown_types_of_blocks_are_found_also_in_results() -> None:
    block, known = {"type": "of_next_year"}, {"type": "text", "text": "a"}
    nested = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "hologram"}, known]}
    search = {"type": "web_search_tool_result", "content": [{"type": "web_search_result"}]}
    silent = [{"type": "fallback"}, {"type": "thinking"}, {"type": "server_tool_use"}, {"text": ""}]
    assert list(unknown_types([block, nested, search, *silent])) == ["of_next_year", "hologram"]
    assert not list(unknown_types("text"))


def test_a_summary_in_an_answer_is_a_users_message() -> None:
    """The model continues the last message of the assistant, and answers a user's."""
    summary = {"type": "compaction", "content": "So far.", "encrypted_content": "x"}
    heading = "The conversation so far, in summary:\n\n"
    assert parsed({"role": "assistant", "content": [summary]}) == (
        Message("user", (TextPart(f"{heading}So far."),)),
    )
    blocks = [{"type": "text", "text": "Ha"}, summary, {"type": "text", "text": "Ho"}]
    texts = [(message.role, message.text) for message in parsed(ANSWER | {"content": blocks})]
    assert texts == [("user", f"{heading}So far."), ("assistant", "Ho")]
    with pytest.raises(InvalidArgument, match=r"messages\[0\]\.content\[1\]"):
        parsed(ANSWER | {"content": [summary, 5]})
    added = {"type": "tool_definition", "definition": TOOL}
    changed = {**summary, "tool_changes": [{"type": "tool_addition", "tool": added}]}
    chat = parse_chat({"messages": [ANSWER | {"content": [changed]}]})
    assert [tool.name for tool in chat.callable_tools] == ["weather"]
    assert chat.messages[0].text.endswith('"properties": {"city": {"type": "string"}}}}\n')


def test_a_summary_stands_for_the_messages_before_it() -> None:
    question, answer = {"role": "user", "content": "Hi"}, {**ANSWER, "content": "Ho"}
    blocks = [{"type": "text", "text": "Ha"}, {"type": "compaction", "content": "So far."}]
    added = {"type": "tool_definition", "definition": TOOL}
    changing = {"role": "system", "content": [{"type": "tool_addition", "tool": added}]}
    old, summary = {**blocks[1], "content": "Long ago."}, {**ANSWER, "content": blocks}
    history = [question, {**ANSWER, "content": [old]}, question, changing, answer]
    chat = parse_chat({"messages": [*history, summary, question, answer], "system": "Be kind."})
    alone = {**blocks[1], "tool_changes": changing["content"]}
    same = {"messages": [{**ANSWER, "content": [alone]}, question, answer], "system": "Be kind."}
    assert chat == parse_chat(same)
    assert [message.role for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[1].text.count('"name": "weather"') == 1
    assert [tool.name for tool in chat.callable_tools] == ["weather"]
    with pytest.raises(InvalidArgument, match=r"messages\[1\]\.content\[2\]"):
        parsed(question, {**ANSWER, "content": [*blocks, 5]})


@pytest.mark.parametrize("content", [None, "", " ", []])
def test_a_compaction_without_a_summary_is_nothing(content: Any) -> None:
    question, answer = {"role": "user", "content": "Hi"}, {**ANSWER, "content": "Ho"}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}
    failed = {"type": "compaction", "content": content, "tool_changes": [removal]}
    messages = [question, answer, {**ANSWER, "content": [failed]}, question]
    chat = parse_chat({"messages": messages, "tools": [TOOL]})
    assert chat == parse_chat({"messages": [question, answer, question], "tools": [TOOL]})
    beside = {**ANSWER, "content": [failed, {"type": "text", "text": "Ho"}]}
    assert parsed(question, beside) == parsed(question, answer)


def test_a_tool_reference_is_the_deferred_tools_definition() -> None:
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    deferred = {**TOOL, "defer_loading": True}
    chat = parse_chat({"messages": [{"role": "user", "content": [result]}], "tools": [deferred]})
    (part,) = chat.messages[0].results[0].content
    assert isinstance(part, TextPart)
    definition = {"name": "weather", "description": "The weather."}
    assert json.loads(part.text) == {**definition, "parameters": TOOL["input_schema"]}
    assert [tool.deferred for tool in chat.tools] == [True]
    assert user_parts(reference) == (TextPart("weather\n"),)  # of a tool that is gone


def test_deferred_tools_that_the_hosted_search_was_to_find_are_not_deferred() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    tools = [search, {**TOOL, "defer_loading": True}]
    chat = parse_chat({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})
    assert [(tool.name, tool.deferred) for tool in chat.tools] == [("weather", False)]
    assert hosted_tools(tools) == [search]


def test_calls_of_server_tools_are_calls_with_results() -> None:
    found = {
        "type": "web_search_result",
        "title": "Rome",
        "url": "https://a.org",
        "encrypted_content": "xyz",
    }
    blocks = [
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "a"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [found]},
        {"type": "text", "text": "Rome."},
        {"type": "mcp_tool_use", "id": "mcp_1", "name": "echo", "server_name": "s", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "mcp_1",
            "is_error": False,
            "content": [{"type": "text", "text": "Hello"}],
        },
    ]
    result = TextPart('{"title": "Rome", "url": "https://a.org"}')
    assert parsed({"role": "assistant", "content": blocks}) == (
        Message("assistant", (ToolCall("srv_1", "web_search", {"query": "a"}),)),
        Message("tool", (ToolResult("srv_1", (result,)),)),
        Message("assistant", (TextPart("Rome."), ToolCall("mcp_1", "echo", {}))),
        Message("tool", (ToolResult("mcp_1", (TextPart("Hello"),)),)),
    )


@pytest.mark.parametrize(
    ("kind", "content", "text", "is_error"),
    [
        ("web_search", {"type": "web_search_tool_result_error", "error_code": "x"}, '"x"', True),
        (
            "web_fetch",
            {
                "type": "web_fetch_result",
                "url": "https://a.org",
                "content": {"type": "document", "source": {"type": "text", "data": "Page."}},
            },
            "https://a.org\n<document>\nPage.\n</document>",
            False,
        ),
        (
            "bash_code_execution",
            {"type": "bash_code_execution_result", "stdout": "hi", "return_code": 0, "content": []},
            '"stdout": "hi"',
            False,
        ),
        (
            "tool_search",
            {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "weather"}],
            },
            "weather",
            False,
        ),
    ],
)
def test_results_of_server_tools_are_readable(
    kind: str, content: Any, text: str, is_error: bool
) -> None:
    block = {"type": f"{kind}_tool_result", "tool_use_id": "a", "content": content}
    (message,) = parsed({"role": "assistant", "content": [block]})
    (result,) = message.results
    assert text in Message("user", result.content).text
    assert result.is_error == is_error


def test_tools_that_the_client_runs_are_functions_and_hosted_ones_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        search,
    ]
    question = [{"role": "user", "content": "Hi"}]
    chat = parse_chat({"messages": question, "tools": tools})
    assert [tool.name for tool in chat.tools] == ["bash", "str_replace_editor"]
    assert all(tool.description and tool.parameters["properties"] for tool in chat.tools)
    assert hosted_tools(tools) == [search]
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        chat = parse_chat({"messages": question, "tools": [search], "tool_choice": choice})
        assert chat.choice == ToolChoice()


def test_tool_choices() -> None:
    def choice(value: Any) -> ToolChoice:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
        return parse_chat({**body, "tool_choice": value}).choice

    assert choice(None) == choice({"type": "auto", "disable_parallel_tool_use": True})
    assert choice({"type": "any"}) == ToolChoice("required")
    assert choice({"type": "none"}) == ToolChoice("none")
    assert choice({"type": "tool", "name": "weather"}) == ToolChoice("required", ("weather",))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\]: role"),
        ({"messages": ["a"]}, r"messages\[0\]: role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]\.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, r"messages\[0\]\.content\[0\]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            r"messages\[0\]\.content\[0\]\.text",
        ),
        (
            {"messages": [{"role": "user", "content": [LOCAL_IMAGE]}]},
            r"messages\[0\]\.content\[0\]\.source\.url",
        ),
        ({"system": {"a": 1}}, "system"),
        ({"tools": [{"name": "no good name"}]}, r"tools\[0\]\.name"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, r"tools\[0\]\.input_schema"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
    ],
    ids=repr,
)
def test_errors_name_the_place(body: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidArgument, match=place):
        parse_chat({"messages": [{"role": "user", "content": "Hi"}], **body})


def test_an_answer_is_content_blocks() -> None:
    call = GeneratedCall("toolu_1", "weather", '{"city": "Rome"}')
    output = Output((ReasoningPart("Hm."), TextPart("Let me see."), call))
    thinking, text, tool_use = format_output(output)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    expected = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    assert tool_use == expected
    assert format_output(Output()) == [{"type": "text", "text": ""}]
    message = {"role": "assistant", "content": format_output(output)}
    assert parsed(message) == (output.message(),)


ODD_VALUES = JSON_VALUES | st.sampled_from(["text", "image", "user", "tool_result", "any", "tool"])
FIELDS = ["type", "role", "content", "text", "source", "input", "name", "id", "title", "thinking"]
ODD_OBJECTS = st.recursive(
    ODD_VALUES,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(messages=ODD_OBJECTS, system=ODD_OBJECTS, tools=ODD_OBJECTS, choice=ODD_OBJECTS)
def test_any_json_is_parsed_or_refused(messages: Any, system: Any, tools: Any, choice: Any) -> None:
    for body in (
        {"messages": messages},
        {"messages": [{"role": "user", "content": messages}], "system": system},
        {"messages": [{"role": "user", "content": [messages]}], "tools": tools},
        {"messages": [{"role": "user", "content": ""}], "tools": [TOOL], "tool_choice": choice},
    ):
        with suppress(InvalidArgument):
            hash(parse_chat(body).messages)
