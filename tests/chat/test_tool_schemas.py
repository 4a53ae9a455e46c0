"""Tools whose keys come in any order."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat import anthropic_messages, openai_chat, openai_responses
from kvkeep.chat.messages import Chat
from kvkeep.chat.renderer import ChatRenderer, RenderOptions
from kvkeep.chat.tool_schemas import canonical_schema
from tests.chat.chats import JSON_VALUES
from tests.chat.templates import QWEN25, write_codec

PLACE = {"type": "object", "properties": {"zip": {"type": "string"}, "city": {"type": "string"}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Of a file", "default": {"b": 1, "a": 2}},
        "content": {"type": "string", "enum": ["x", "y"]},
        "depth": {"type": "integer", "minimum": 0},
        "after": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["path", "content"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}


def shuffled(value: Any, order: random.Random) -> Any:
    """Return an equal JSON value with the keys of all objects in another order."""
    if isinstance(value, Mapping):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(member, order) for member in value] if isinstance(value, list) else value


def requests(schema: Any, order: random.Random) -> list[Chat]:
    """Return a conversation with two tools in each API."""
    tools = [{"name": name, "description": "d"} for name in ("write", "append")]
    messages = [{"role": "user", "content": "Hi"}]
    functions = [{"type": "function", "function": {**t, "parameters": schema}} for t in tools]
    flat = [{"type": "function", **t, "parameters": schema} for t in tools]
    inputs = [{**t, "input_schema": schema} for t in tools]
    return [
        openai_chat.parse_chat({"messages": messages, "tools": shuffled(functions, order)}),
        openai_responses.parse_chat({"input": messages, "tools": shuffled(flat, order)}),
        anthropic_messages.parse_chat({"messages": messages, "tools": shuffled(inputs, order)}),
    ]


def test_the_order_of_keys_changes_no_prompt(tmp_path: Path) -> None:
    renderer = ChatRenderer(write_codec(tmp_path, QWEN25))
    chats = [chat for n in range(3) for chat in requests(SCHEMA, random.Random(n))]
    texts = {str(renderer.render(chat).text) for chat in chats}
    assert len(texts) == 1
    (text,) = texts
    assert text.index('"write"') < text.index('"append"')  # the list is in the client's order


def test_keys_are_in_the_order_that_models_know() -> None:
    schema = canonical_schema(shuffled(SCHEMA, random.Random(0)))
    assert list(schema) == ["type", "properties", "required", "additionalProperties", "$defs"]
    assert list(schema["properties"]) == ["path", "content", "after", "depth"]
    assert list(schema["properties"]["path"]) == ["type", "description", "default"]
    assert schema == SCHEMA


@given(JSON_VALUES, st.randoms(use_true_random=False))
def test_any_value_keeps_what_it_says(value: Any, order: random.Random) -> None:
    schema = {"type": "object", "properties": {"a": value, "b": {}}, "required": ["b", [], value]}
    result = canonical_schema(schema)
    assert result == schema
    assert str(result) == str(canonical_schema(shuffled(schema, order)))
    assert str(result) == str(canonical_schema(result))


def test_a_tool_that_a_search_finds_changes_nothing_before_it(tmp_path: Path) -> None:
    """Its definition is in the result of the search, also if it is listed from then on."""
    renderer = ChatRenderer(write_codec(tmp_path, QWEN25))
    question = {"role": "user", "content": "Hi"}
    search = {"name": "search", "description": "Finds tools", "input_schema": {"type": "object"}}
    found = {"name": "weather", "description": "Of a city", "input_schema": SCHEMA}
    use = {"type": "tool_use", "id": "call_1", "name": "search", "input": {}}
    reference = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": reference}
    history = [question, {"role": "assistant", "content": [use]}]
    history.append({"role": "user", "content": [result]})
    deferred = {**found, "defer_loading": True}
    parse = anthropic_messages.parse_chat
    before = [{"messages": [question], "tools": tools} for tools in ([search], [search, deferred])]
    after = {"messages": history, "tools": [search, deferred]}

    finder = {"type": "tool_search", "execution": "client", "description": "Finds tools"}
    call = {"type": "tool_search_call", "call_id": "call_1", "arguments": {}, "execution": "client"}
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "defer_loading": True}
    output = {"type": "tool_search_output", "call_id": "call_1", "tools": [tool]}
    items = {"input": [question, call, output], "tools": [finder]}
    for first, second in (
        *((parse(body), parse(after)) for body in before),
        (openai_responses.parse_chat({**items, "input": [question]}), None),
    ):
        second = second or openai_responses.parse_chat(items)
        start = renderer.render(first, RenderOptions(generation_prompt=False)).text
        text = renderer.render(second).text
        assert text.startswith(start)
        assert "weather" not in start
        assert '"weather"' in text
        assert "weather" in {tool.name for tool in second.callable_tools}
