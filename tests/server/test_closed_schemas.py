"""Schemas as constraints: closed objects, and references within the parameters of tools."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from kvkeep.chat.messages import Tool
from kvkeep.model import Model
from kvkeep.server.call_grammar import forced_call_schema
from kvkeep.server.grammar import Grammar, close_objects

CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BASE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


def accepts(model: Model, schema: dict[str, Any], value: Any) -> bool:
    """Whether an answer by the schema may be this value."""
    text = json.dumps(value, separators=(",", ":"))
    tokens = model.text.encode(text)
    matcher: LLMatcher = Grammar.from_schema(model, schema)._matcher
    return matcher.validate_tokens(tokens) == len(tokens) and (
        matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (CITY, {"name": "a"}, {"name": "a", "more": 1}),
        ({**CITY, "additionalProperties": True}, {"name": "a", "more": 1}, {"more": 1}),
        ({"type": "array", "items": CITY}, [{"name": "a"}], [{"name": "a", "more": 1}]),
        (
            {"$defs": {"city": CITY}, **BASE, "properties": {"id": {"$ref": "#/$defs/city"}}},
            {"id": {"name": "a"}},
            {"id": {"name": "a", "more": 1}},
        ),
        ({"anyOf": [CITY, BASE]}, {"id": 1}, {"id": 1, "name": "a"}),
        ({"allOf": [CITY, BASE]}, {"name": "a", "id": 1}, {"name": "a"}),
        ({"type": "object"}, {"any": {"thing": 1}}, []),
    ],
)
def test_an_object_has_its_own_properties_alone(
    smollm2: Model, schema: dict[str, Any], allowed: Any, refused: Any
) -> None:
    assert accepts(smollm2, schema, allowed)
    assert not accepts(smollm2, schema, refused)


def test_names_and_values_that_look_like_keywords_are_left_alone() -> None:
    value = {"properties": {"a": 1}}
    schema = {"properties": {"properties": {"const": value}, "items": {"default": value}}}
    assert close_objects(schema) == {**schema, "additionalProperties": False}


def test_parameters_of_a_forced_call_may_refer_to_their_own_definitions(smollm2: Model) -> None:
    trip = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/city"}, "then": {"$ref": "#"}},
        "required": ["to"],
        "$defs": {"city": CITY},
    }
    schema = forced_call_schema([Tool("other"), Tool("travel", parameters=trip)])
    value = {"to": {"name": "a"}, "then": {"to": {"name": "b"}}}
    assert accepts(smollm2, schema, {"name": "travel", "arguments": value})
    assert not accepts(smollm2, schema, {"name": "travel", "arguments": {"to": "a"}})
