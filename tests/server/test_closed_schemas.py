"""Schemas as constraints: closed objects, and references within the parameters of tools."""

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from kvkeep.chat.messages import Tool
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.call_grammar import forced_call_schema
from kvkeep.server.closed_schemas import close_objects
from kvkeep.server.grammar import Grammar
from kvkeep.server.resolved_schemas import prepared_schema

CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BASE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


def accepts(model: Model, schema: dict[str, Any], value: Any) -> bool:
    """Whether an answer by the schema may be this value."""
    return accepts_prepared(model, prepared_schema(schema), value)


def accepts_prepared(model: Model, schema: dict[str, Any], value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":"))
    tokens = model.text.encode(text)
    matcher: LLMatcher = Grammar.from_prepared(model, schema)._matcher
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
    tools = [Tool("other"), Tool("travel", parameters=prepared_schema(trip))]
    schema = forced_call_schema(tools)
    value = {"to": {"name": "a"}, "then": {"to": {"name": "b"}}}
    assert accepts_prepared(smollm2, schema, {"name": "travel", "arguments": value})
    assert not accepts_prepared(smollm2, schema, {"name": "travel", "arguments": {"to": "a"}})


NESTED = {"type": "object", "properties": {"x": {"type": "object", "properties": {"y": {}}}}}
MERGES = {
    # Strings that are merged open nothing.
    "strings": (
        {**CITY, "properties": {"name": {"allOf": [{"type": "string"}, {"minLength": 1}]}}},
        [{"name": "a"}],
        [{"name": "a", "more": 1}, {"name": ""}],
    ),
    "beside": (
        {"properties": {"a": CITY, "b": {"allOf": [CITY, BASE]}}, "required": ["a", "b"]},
        [{"a": {"name": "a"}, "b": {"name": "a", "id": 1}}],
        [{"a": {"name": "a", "more": 1}, "b": {"name": "a", "id": 1}}],
    ),
    "all": ({"allOf": [CITY, BASE]}, [{"name": "a", "id": 1}], [{"name": "a", "id": 1, "more": 1}]),
    "all of references": (
        {"allOf": [{"$ref": "#/$defs/c"}, BASE], "$defs": {"c": CITY}},
        [{"name": "a", "id": 1}],
        [{"name": "a", "id": 1, "more": 1}, {"id": 1}],
    ),
    "open part": (
        {"allOf": [CITY, {**BASE, "additionalProperties": True}]},
        [{"name": "a", "id": 1}, {"name": "a", "id": 1, "more": 1}],
        [{"name": 1, "id": 1}],
    ),
    "reference with more": (
        {"$ref": "#/$defs/c", "properties": {"id": {"type": "integer"}}, "$defs": {"c": CITY}},
        [{"name": "a", "id": 1}],
        [{"name": "a", "id": 1, "more": 1}],
    ),
    "choice of required": (
        {"properties": {"v": {}, "w": {}}, "anyOf": [{"required": ["v"]}, {"required": ["w"]}]},
        [{"v": 1}, {"w": 1}, {"v": 1, "w": 1}],
        [{}, {"v": 1, "more": 1}],
    ),
    "choice with more": (
        {"properties": {"v": {"type": "integer"}}, "oneOf": [CITY, BASE], "required": ["v"]},
        [{"v": 1, "name": "a"}, {"v": 1, "id": 1}],
        [{"v": 1, "name": "a", "more": 1}],
    ),
    "unevaluated": (
        {**CITY, "unevaluatedProperties": False},
        [{"name": "a"}],
        [{"name": "a", "b": 1}],
    ),
    "unevaluated of all": (
        {"allOf": [CITY, BASE], "unevaluatedProperties": False},
        [{"name": "a", "id": 1}],
        [{"name": "a", "id": 1, "more": 1}],
    ),
    "same property": (
        {"allOf": [NESTED, {"properties": {"x": {"properties": {"z": {}}, "type": "object"}}}]},
        [{"x": {"y": 1, "z": 1}}],
        [{"x": {}, "more": 1}],
    ),
    "required alone": (
        {**CITY, "required": ["name", "b"]},
        [{"name": "a", "b": [1]}],
        [{"name": "a"}, {"name": "a", "b": 1, "c": 1}],
    ),
    "at least one": (
        {"properties": {"a": {}, "b": {}}, "minProperties": 1},
        [{"a": 1}, {"a": 1, "b": 1}],
        [{}, {"c": 1}],
    ),
}


@pytest.mark.parametrize("kind", MERGES)
def test_schemas_of_one_object_are_closed_together(kind: str, smollm2: Model) -> None:
    schema, allowed, refused = MERGES[kind]
    typed = {"type": "object", **schema}
    for value in allowed:
        assert accepts(smollm2, typed, value), value
    for value in refused:
        assert not accepts(smollm2, typed, value), value


def test_a_schema_that_merges_others_opens_no_other_tool(smollm2: Model) -> None:
    merged = {"type": "object", "properties": {"y": {"allOf": [NESTED, BASE]}}}
    tools = [Tool("first", parameters=CITY), Tool("second", parameters=merged)]
    schema = forced_call_schema(
        [replace(t, parameters=prepared_schema(t.parameters)) for t in tools]
    )
    wrong = {"name": "first", "arguments": {"name": "a", "more": 1}}
    assert accepts_prepared(smollm2, schema, {**wrong, "arguments": {"name": "a"}})
    assert not accepts_prepared(smollm2, schema, wrong)


def test_a_definition_that_is_merged_somewhere_is_open_there_only_for_what_is_shared() -> None:
    schema = {
        "properties": {"a": {"allOf": [{"$ref": "#/$defs/d0"}, BASE]}, "b": {"$ref": "#/$defs/d0"}},
        "$defs": {"d0": NESTED},
    }
    closed = close_objects(schema)
    assert closed["$defs"]["d0"]["properties"]["x"]["additionalProperties"] is False
    assert "additionalProperties" not in closed["$defs"]["d0"]
    assert set(closed["properties"]["a"]["properties"]) == {"x", "id"}


def test_names_of_merged_parts_do_not_grow_without_limit() -> None:
    """Each of many objects merges a definition of many names."""
    names = {f"name_{n}": {} for n in range(2_000)}
    objects = {f"o{n}": {"$ref": "#/$defs/d", "properties": {"x": {}}} for n in range(2_000)}
    with pytest.raises(InvalidArgument, match="merged parts"):
        prepared_schema({"properties": objects, "$defs": {"d": {"properties": names}}})
