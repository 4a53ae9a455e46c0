"""Values between tags get the types of the schema; values as in Python are not lost."""

import json
from typing import Any

import pytest

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.chat.messages import Tool
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.tagged_calls import ArgumentTypes
from tests.chat.test_output_reader import described, read


def read_value(schema: dict[str, Any], text: str) -> Any:
    """Return the value that is read from a text between tags."""
    tool = Tool("run", parameters={"properties": {"a": schema}, "$defs": {"List": LIST}})
    reader = OutputReader(format_by_name("qwen3-coder"), [tool])
    reader.push([f"<tool_call><function=run><parameter=a>{text}</parameter></function>"])
    reader.finish()
    (call,) = reader.output.calls
    return json.loads(call.arguments)["a"]


LIST = {"type": "array"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "object"}, "{'a': [1, None, True], 'b': 'it\\'s'}", {"a": [1, None, True]}),
        ({"type": "object"}, "{'a': {}}\n", {"a": {}}),
        ({"type": "array"}, "['x', \"y\", (1, 2)]", ["x", "y", [1, 2]]),
        ({"type": ["array", "null"]}, "('x',)", ["x"]),
        ({"type": "array"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, "{'a': f(1)}", "{'a': f(1)}"),
        ({"type": "object"}, "{'a': 1} or so", "{'a': 1} or so"),
        ({"type": "object"}, "{'a'", "{'a'"),
        ({"type": ["object", "string"]}, "{'a': 1}", "{'a': 1}"),
        ({"type": "string"}, "['x']", "['x']"),
        ({}, "['x']", "['x']"),
        ({"allOf": [{"$ref": "#/$defs/List"}]}, "['x']", ["x"]),
    ],
)
def test_python_literals_are_values_of_arrays_and_objects(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    found = read_value(schema, text)
    if isinstance(value, dict) and "b" in found:
        assert found.pop("b") == "it's"
    assert found == value


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, {"number"}),
        ({"allOf": [{"description": "d"}, {"$ref": "#/$defs/Count"}]}, {"number"}),
        ({"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}]}, {"string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/Loop"}]}, set()),
        ({"allOf": [1, "x", {}]}, set()),
        ({"allOf": {}}, set()),
    ],
)
def test_the_types_of_a_member_of_all_of_are_those_of_the_value(
    schema: dict[str, Any], types: set[str]
) -> None:
    definitions = {"Count": {"type": "integer"}, "Loop": {"allOf": [{"$ref": "#/$defs/Loop"}]}}
    tool = Tool("run", parameters={"properties": {"a": schema}, "$defs": definitions})
    assert ArgumentTypes(tool).of("a") == types


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
def test_a_channel_of_gemma_that_is_opened_twice_is_one(size: int) -> None:
    text = "<|channel><|channel>thought\n{}<channel|>Hello"
    assert described(read(text.format(""), "gemma4", size)) == ["Hello"]
    assert described(read(text.format("Hm."), "gemma4", size)) == ["Hm.", "Hello"]


@pytest.mark.parametrize("arguments", ["w1.", "a=w1.", "</x>w1.", "a=[w1."])
def test_what_is_no_value_of_a_call_as_in_python_is_not_lost(arguments: str) -> None:
    """The call is incomplete, and no client runs it."""
    for size in (1, 2, 10**9):
        output = read(f"<function_calls>weather({arguments}", "olmo3", size)
        (call,) = output.calls
        assert not call.complete
        assert "w1." in call.arguments + output.text
