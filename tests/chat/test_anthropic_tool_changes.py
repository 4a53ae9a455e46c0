"""Tools that are added and removed within a conversation of Anthropic's API."""

import json
from typing import Any

import pytest

from kvkeep.chat.anthropic_messages import parse_chat
from kvkeep.chat.anthropic_tool_changes import ignored_changes, last_changes
from kvkeep.chat.messages import Chat, Message, TextPart, ToolChoice
from kvkeep.errors import InvalidArgument

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
TIME = {"name": "time", "description": "The time.", "input_schema": SCHEMA}
TIME_LINE = json.dumps({"name": "time", "description": "The time.", "parameters": SCHEMA})
ADDED = "From here on these functions can be called, too:"
REMOVED = "From here on these functions can no longer be called:"
QUESTION = {"role": "user", "content": "Hi"}


def added(definition: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}


def referred(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


def chat_of(*blocks: dict[str, Any], **fields: Any) -> Chat:
    """A conversation with a question, and a system message of these blocks behind it."""
    later = {"role": "system", "content": list(blocks)}
    return parse_chat({"messages": [QUESTION, later], "tools": [WEATHER], **fields})


def callable_names(chat: Chat) -> list[str]:
    return [tool.name for tool in chat.callable_tools]


def test_an_added_tool_is_described_in_its_place_and_can_be_called() -> None:
    chat = chat_of(added(TIME))
    text = TextPart(f"{ADDED}\n{TIME_LINE}\n")
    assert chat.messages == (Message("user", (TextPart("Hi"),)), Message("system", (text,)))
    assert callable_names(chat) == ["weather", "time"]
    assert [tool.deferred for tool in chat.tools] == [False, True]  # the beginning is unchanged
    assert chat.choice == ToolChoice()
    required = chat_of(added(TIME), tool_choice={"type": "tool", "name": "time"})
    assert callable_names(required) == ["time"]


def test_neighbouring_changes_have_one_heading() -> None:
    chat = chat_of(
        {"type": "text", "text": "Note:"},
        added(TIME),
        added({**TIME, "name": "clock"}),
        referred("tool_removal", "weather"),
        {"type": "text", "text": "Done."},
    )
    clock = TIME_LINE.replace('"time"', '"clock"')
    expected = f"Note:\n{ADDED}\n{TIME_LINE}\n{clock}\n{REMOVED}\nweather\nDone."
    assert chat.messages[-1].text == expected


def test_a_reference_is_the_tools_definition() -> None:
    deferred = {**TIME, "defer_loading": True}
    chat = chat_of(referred("tool_addition", "time"), tools=[WEATHER, deferred])
    assert chat.messages[-1].text == f"{ADDED}\n{TIME_LINE}\n"
    assert callable_names(chat) == ["weather", "time"]


def test_a_removed_tool_stays_described_and_cannot_be_called() -> None:
    chat = chat_of(added(TIME), referred("tool_removal", "weather"))
    assert [tool.name for tool in chat.tools] == ["weather", "time"]
    assert chat.choice == ToolChoice("auto", ("time",))
    again = chat_of(referred("tool_removal", "weather"), referred("tool_addition", "weather"))
    assert callable_names(again) == ["weather"]
    none = chat_of(referred("tool_removal", "weather"))
    assert callable_names(none) == []
    assert chat_of(
        added(TIME), referred("tool_removal", "weather"), tool_choice={"type": "any"}
    ).choice == ToolChoice("required", ("time",))
    with pytest.raises(InvalidArgument, match="no such tool"):
        chat_of(
            referred("tool_removal", "weather"), tool_choice={"type": "tool", "name": "weather"}
        )


def test_a_tool_that_is_defined_again_has_its_newest_definition() -> None:
    """The prompt describes the request's definition first, as before, and the newest in place."""
    new = {**WEATHER, "description": "New."}
    chat = chat_of(added(new))
    assert [(tool.description, tool.deferred) for tool in chat.tools] == [
        ("The weather.", False),
        ("New.", True),
    ]
    assert [(tool.name, tool.description) for tool in chat.callable_tools] == [("weather", "New.")]
    assert chat.messages[-1].text.count("New.") == 1
    removal, reference = (referred(f"tool_{kind}", "weather") for kind in ("removal", "addition"))
    again = chat_of(removal, reference)
    later = {"role": "system", "content": [added(new)]}
    entries = [QUESTION, {"role": "system", "content": [removal, reference]}, QUESTION, later]
    assert parse_chat({"messages": entries, "tools": [WEATHER]}).messages[:2] == again.messages


def test_an_added_tool_that_the_client_lists_from_then_on_changes_no_beginning() -> None:
    before, listed = chat_of(added(TIME)), chat_of(added(TIME), tools=[WEATHER, TIME])
    assert listed == before
    removed = referred("tool_removal", "time")
    back = chat_of(removed, added(TIME), tools=[WEATHER, TIME])
    assert [tool.deferred for tool in back.tools] == [False, False]  # it was there before


@pytest.mark.parametrize("kind", ["tool_addition", "tool_removal"])
def test_references_to_what_is_no_tool_are_left_out(kind: str) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    for name in ("gone", "web_search"):
        chat = chat_of(referred(kind, name), tools=[WEATHER, search])
        assert chat == parse_chat({"messages": [QUESTION], "tools": [WEATHER]})
        answer = {"role": "assistant", "content": [referred(kind, name), {"text": "Ho"}]}
        assert len(parse_chat({"messages": [QUESTION, answer]}).messages) == 2
        changes = [{"role": "system", "content": [referred(kind, name), added(TIME)]}]
        assert list(ignored_changes(changes, ["weather"])) == [f"{kind}.{name}"]
    later = [{"role": "system", "content": [added(TIME), referred(kind, "time")]}]
    assert not list(ignored_changes(later, []))


def test_tools_that_the_hosted_api_runs_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    toolset = {"type": "mcp_toolset_reference", "server_name": "a"}
    chat = chat_of(added(search), {"type": "tool_addition", "tool": toolset})
    assert chat.messages == (Message("user", (TextPart("Hi"),)),)
    assert callable_names(chat) == ["weather"]


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"type": "tool_addition"}, r"messages\[1\]\.content\[0\]\.tool must be"),
        (added({"name": "no good name"}), r"content\[0\]\.tool\.definition\.name"),
        (referred("tool_removal", 5), r"content\[0\]\.tool\.name"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_malformed_changes_are_refused(block: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidArgument, match=place):
        chat_of(block)


def test_the_last_change_of_each_tool_counts() -> None:
    removal = referred("tool_removal", "weather")
    blocks = [removal, added(TIME), referred("tool_addition", "weather"), removal]
    message = {"role": "system", "content": blocks}
    assert last_changes([QUESTION, message]) == [added(TIME), removal]


def test_an_addition_after_a_removal_has_its_definition() -> None:
    blocks = [added(TIME), referred("tool_removal", "time"), referred("tool_addition", "time")]
    assert last_changes([QUESTION, {"role": "system", "content": blocks}]) == [added(TIME)]


def test_changes_in_an_answer_are_described_behind_it() -> None:
    text = {"type": "text", "text": "Ho"}
    answer: dict[str, Any] = {"role": "assistant", "content": [added(TIME), text]}
    description = f"{ADDED}\n{TIME_LINE}\n"
    beginning = [("user", "Hi"), ("assistant", "Ho")]
    for later, expected in (
        ([], [*beginning, ("user", description)]),
        ([QUESTION], [*beginning, ("user", f"{description}Hi")]),
        ([{"role": "assistant", "content": "So"}], None),
    ):
        chat = parse_chat({"messages": [QUESTION, answer, *later]})
        texts = [(message.role, message.text) for message in chat.messages]
        assert texts == (expected or [*beginning, ("user", description), ("assistant", "So")])
        assert callable_names(chat) == ["time"]
    answer["content"].append({"type": "tool_use", "id": "a", "name": "weather", "input": {}})
    result = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
    chat = parse_chat({"messages": [QUESTION, answer, {"role": "user", "content": [result]}]})
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "user"]
    assert chat.messages[-1].text == description
