"""Schemas of strict tools in grammars: references, names, numbers and size."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvkeep.chat.messages import Tool
from kvkeep.chat.tagged_calls import FUNCTION_TAGS, ArgumentTypes
from kvkeep.model import Model
from kvkeep.server import argument_grammar as arguments
from kvkeep.server.call_grammar import AllowedCalls
from kvkeep.server.call_writers import write_calls
from kvkeep.server.grammar import Grammar
from kvkeep.server.lark_rules import LarkRules, literal
from kvkeep.server.resolved_schemas import prepared_schema, resolved_schema
from kvkeep.server.tool_grammars import first_supported, marker_ids
from tests.chat.test_tagged_values import read_value
from tests.server.test_call_grammar import accepts, model_of, written

BOOLEAN = {"type": "boolean"}
WEATHER = Tool(
    "weather", parameters={"type": "object", "properties": {"city": BOOLEAN}, "required": ["city"]}
)


def grammar_of(model: Model, name: str, *tools: Tool) -> Grammar:
    def compiled(tools: Any) -> Grammar:
        rules = LarkRules(marker_ids(model), model.end_token_ids)
        calls = write_calls(model.renderer.output_format.name, AllowedCalls(rules, tools))
        return Grammar.from_lark(model, rules.text(calls))

    return first_supported(model, tools, compiled)


def switch(value: Any, **more: Any) -> Tool:
    """Return a tool with one argument."""
    properties = {"v": value} if value is not None else {}
    parameters = {"type": "object", "properties": properties, "required": [*properties], **more}
    return Tool("switch", parameters=parameters)


REFERRING = {
    "id": switch({"$ref": "#/$defs/V"}, **{"$id": "https://x.y/s.json", "$defs": {"V": BOOLEAN}}),
    "whole id": switch(
        {"$ref": "https://x.y/s.json#/$defs/V"},
        **{"$id": "https://x.y/s.json", "$defs": {"V": BOOLEAN}},
    ),
    "anchor": switch({"$ref": "#vv"}, **{"$defs": {"V": {"$anchor": "vv", **BOOLEAN}}}),
    "old anchor": switch({"$ref": "#vv"}, definitions={"V": {"$id": "#vv", **BOOLEAN}}),
    "inner id": switch({"$id": "urn:q", "$ref": "#/$defs/V", "$defs": {"V": BOOLEAN}}),
    "id of no base": switch({"$id": "x", "$ref": "#/$defs/V"}, **{"$defs": {"V": BOOLEAN}}),
    "escaped": switch({"$ref": "#/$defs/a~1b%20c"}, **{"$defs": {"a/b c": BOOLEAN}}),
    "list": switch({"$ref": "#/x/0"}, x=[BOOLEAN]),
    "chain": switch(
        {"$ref": "#/$defs/0"},
        **{"$defs": {**{str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(400)}, "400": BOOLEAN}},
    ),
    "root": Tool(
        "switch",
        parameters={"$ref": "#/$defs/R", "$defs": {"R": switch(BOOLEAN).parameters}},
    ),
}


@pytest.mark.parametrize("kind", REFERRING)
def test_references_are_resolved(kind: str) -> None:
    schema = prepared_schema(REFERRING[kind].parameters)
    assert set(schema) - {"$defs"} == set(switch(BOOLEAN).parameters) | {"additionalProperties"}
    value = schema["properties"]["v"]
    (target,) = schema.get("$defs", {"": value}).values()
    assert target == BOOLEAN
    assert value in (BOOLEAN, {"$ref": "#/$defs/d0"})
    assert ArgumentTypes(REFERRING[kind]).of("v") == {"boolean"}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_a_tool_with_an_id_leaves_others_as_they_are(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    named = switch({"$ref": "#vv"}, **{"$defs": {"V": {"$anchor": "vv", **BOOLEAN}}})
    other = Tool("other", parameters={**REFERRING["id"].parameters})
    odd = Tool("odd", parameters={"properties": {"$ref": BOOLEAN, "$id": {"const": {"$ref": "#"}}}})
    grammar = grammar_of(model, name, WEATHER, named, other, odd)
    assert grammar.warnings == ()
    for tool, right in (
        ("weather", {"city": True}),
        ("switch", {"v": True}),
        ("other", {"v": True}),
    ):
        assert accepts(model, grammar, written(name, [(tool, right)]))
        assert not accepts(model, grammar, written(name, [(tool, {"x": 1})]))
        assert not accepts(model, grammar, written(name, [(tool, dict.fromkeys(right, 3))]))
    assert accepts(model, grammar, written(name, [("odd", {"$ref": True, "$id": {"$ref": "#"}})]))


def test_only_the_tool_that_is_not_supported_is_free(tmp_path: Path) -> None:
    model = model_of("hermes", tmp_path)
    lost = switch({"$ref": "https://x.y/s.json"})
    strange = Tool("strange", parameters=switch({"type": "strange"}).parameters)
    grammar = grammar_of(model, "hermes", WEATHER, lost, strange)
    first, second = grammar.warnings
    assert "switch" in first
    assert "'https://x.y/s.json' leads to nothing" in first
    assert "strange" in second
    assert accepts(model, grammar, written("hermes", [("switch", {"x": 1})]))
    assert not accepts(model, grammar, written("hermes", [("weather", {"x": 1})]))


def test_annotations_and_definitions_without_use_are_left_out() -> None:
    schema = {
        "title": "T",
        "properties": {"title": {"type": "string", "description": "x" * 300_000}},
        "$defs": {"Unused": {"enum": ["y" * 300_000]}},
    }
    properties = {"title": {"type": "string"}}
    assert resolved_schema(schema) == {"properties": properties}
    assert prepared_schema(schema) == {"properties": properties, "additionalProperties": False}


def test_a_part_that_others_refer_to_is_written_once() -> None:
    """Each level refers to the one below, and has it too."""
    schema: dict[str, Any] = {"enum": ["x" * 1000]}
    for depth in range(60, 0, -1):
        pointer = "#/properties/a" * 0 + "#" + "/properties/a" * depth
        schema = {"properties": {"a": schema, "b": {"$ref": pointer}}}
    assert len(json.dumps(resolved_schema(schema))) < 20_000


LINKS = {
    "any": lambda name: {"anyOf": [{"$ref": name}]},
    "or null": lambda name: {"anyOf": [{"$ref": name}, {"type": "null"}]},
    "all": lambda name: {"allOf": [{"$ref": name}, {"description": "x"}]},
}


@pytest.mark.parametrize("link", LINKS)
def test_long_chains_of_references_are_followed(link: str) -> None:
    definitions = {str(n): LINKS[link](f"#/$defs/{n + 1}") for n in range(450)}
    tool = switch({"$ref": "#/$defs/0"}, **{"$defs": {**definitions, "450": BOOLEAN}})
    types = {"boolean"} | ({"null"} if link == "or null" else set())
    assert ArgumentTypes(tool).of("v") == types
    rules = LarkRules({}, ())
    prepared = Tool("switch", parameters=prepared_schema(tool.parameters))
    text = rules.text(arguments.tagged_arguments(rules, prepared, literal, "</x>"))
    assert '"true" | "false"' in text or link == "all"


def test_grammars_in_tags_do_not_grow_with_definitions(tmp_path: Path) -> None:
    """Many arguments, and many definitions that none of them needs or all do."""
    texts = []
    for count in (1, 100):
        definitions = {f"D{n}": {"enum": [n, n + 0.5]} for n in range(count)}
        anything = {"type": "array", "items": {"$ref": "#/$defs/D0"}}
        properties = {f"p{n}": [{"type": "integer"}, anything][n % 2] for n in range(300)}
        parameters = {"type": "object", "properties": properties, "$defs": definitions}
        tool = Tool("switch", parameters=prepared_schema(parameters))
        rules = LarkRules({}, ())
        texts.append(rules.text(arguments.tagged_arguments(rules, tool, literal, "</x>")))
    assert texts[0] == texts[1]
    assert texts[0].count("%json") == 1


@pytest.mark.parametrize("name", ["qwen3-coder", "lfm2", "gemma4"])
def test_integers_have_no_fractions(name: str, tmp_path: Path) -> None:
    """They may be behind references, and one choice of several."""
    model = model_of(name, tmp_path)
    integer, defined = {"type": "integer"}, {"$defs": {"N": {"type": "integer"}}}
    for schema in (
        integer,
        {"$ref": "#/$defs/N"},
        {"allOf": [{"$ref": "#/$defs/N"}]},
        {"allOf": [{"minimum": 0}, {"$ref": "#/$defs/N"}]},
        {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
        {"oneOf": [integer, BOOLEAN]},
    ):
        grammar = grammar_of(model, name, switch(schema, **defined))
        assert grammar.warnings == ()
        assert accepts(model, grammar, written(name, [("switch", {"v": 52})])), schema
        assert not accepts(model, grammar, written(name, [("switch", {"v": 52.9})])), schema
    grammar = grammar_of(model, name, switch({"anyOf": [{"type": "number"}, BOOLEAN]}))
    assert accepts(model, grammar, written(name, [("switch", {"v": 52.9})]))


NAMES = ("user-id", "$filter", "a.b", "first name", "2d", "名前", 'a"b')


@pytest.mark.parametrize("name", ["lfm2", "olmo3"])
def test_names_that_no_call_as_in_python_can_have(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    for key in NAMES:
        parameters = {"properties": {key: BOOLEAN}, "required": [key]}
        grammar = grammar_of(model, name, Tool("odd", parameters=parameters), WEATHER)
        in_python = written(name, [("odd", {"v": True})]).replace("v=", f"{key}=")
        assert not accepts(model, grammar, in_python), key
        assert accepts(model, grammar, written(name, [("weather", {"city": True})]))
        assert not accepts(model, grammar, written(name, [("weather", {"city": 3})]))
        if name == "lfm2":
            assert grammar.warnings == ()
            call = json.dumps([{"name": "odd", "arguments": {key: True}}], ensure_ascii=False)
            assert accepts(model, grammar, f"<|tool_call_start|>{call}<|tool_call_end|>")
        else:
            assert f"cannot have the name {key!r}" in grammar.warnings[0]
    for key in ("größe", "class", "_x"):  # which can
        grammar = grammar_of(model, name, Tool("odd", parameters={"properties": {key: BOOLEAN}}))
        assert grammar.warnings == ()
        assert accepts(model, grammar, written(name, [("odd", {key: True})])), key


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
def test_arguments_behind_a_constant_text_are_required(name: str, tmp_path: Path) -> None:
    """A text has two forms in Python's."""
    model = model_of(name, tmp_path)
    properties = {"a": {"const": "fix"}, "b": BOOLEAN}
    parameters = {"properties": properties, "required": ["a", "b"]}
    grammar = grammar_of(model, name, Tool("switch", parameters=parameters))
    for values in ({"a": "fix", "b": True}, {"a": "fix"}, {"b": True}):
        is_allowed = len(values) == 2
        assert accepts(model, grammar, written(name, [("switch", values)])) == is_allowed


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": ["number", "null"]}])
def test_numbers_between_tags_can_be_read(schema: dict[str, Any], tmp_path: Path) -> None:
    model = model_of("qwen3-coder", tmp_path)
    grammar = grammar_of(model, "qwen3-coder", switch(schema))
    call = written("qwen3-coder", [("switch", {"v": 1})])
    for number, is_allowed in (("1e-5", True), ("-4.17E+74", True), ("4.17E741", False)):
        text = call.replace("\n1\n", f"\n{number}\n")
        assert accepts(model, grammar, text) == is_allowed
        assert isinstance(read_value({"type": "number"}, number), float) == is_allowed


@pytest.mark.parametrize("kind", ["allOf", "$ref", "anyOf"])
def test_properties_that_are_not_at_the_top(kind: str, tmp_path: Path) -> None:
    """In tags they are followed in all that hold together, and there is a warning otherwise."""
    inner = switch(BOOLEAN).parameters
    parameters = {
        "allOf": {"allOf": [inner, {"properties": {"w": {"type": "integer"}}}]},
        "$ref": {"$ref": "#/$defs/R", "$defs": {"R": inner}},
        "anyOf": {"anyOf": [inner, {"properties": {"w": {"type": "integer"}}}]},
    }[kind]
    model = model_of("qwen3-coder", tmp_path)
    grammar = grammar_of(model, "qwen3-coder", Tool("switch", parameters=parameters))
    call = written("qwen3-coder", [("switch", {"v": 3})])
    assert accepts(model, grammar, call) == (kind == "anyOf")
    assert ("properties at the top" in str(grammar.warnings)) == (kind == "anyOf")
    assert accepts(model, grammar, call.replace("\n3\n", "\ntrue\n"))


def test_names_in_tags_that_the_reader_would_cut_off_are_free() -> None:
    for key in ("a>b", " a", "", "x" * 300):
        tool = Tool("switch", parameters={"properties": {key: BOOLEAN}})
        with pytest.raises(ValueError, match="cannot have the name"):
            arguments.tagged_arguments(
                LarkRules({}, ()), tool, literal, "</x>", name=FUNCTION_TAGS.label
            )


def test_no_text_is_written_for_parameters_that_are_too_large_together(smollm2: Model) -> None:
    """They are looked at only once they are free."""
    written_tools = []

    def compiled(tools: Sequence[Tool]) -> Grammar:
        written_tools.extend(tools)
        return Grammar.from_prepared(smollm2, tools[0].parameters)

    parameters = {"properties": {"a": {"enum": ["x" * 150_000]}}}
    tools = [Tool(f"tool_{number}", parameters=parameters) for number in range(20)]
    grammar = first_supported(smollm2, tools, compiled)
    assert "together they are too large" in str(grammar.warnings)
    assert [tool.parameters for tool in written_tools] == [{"type": "object"}] * 20
