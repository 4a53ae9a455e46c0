"""The grammar of an answer that is calls or JSON, in every form of calls."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import FORMATS
from kvkeep.model import Model
from kvkeep.server.answer_grammar import compile_answer_or_calls
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from tests.chat.test_families import SIGNS
from tests.chat.written_answers import FORMS
from tests.scripted_model import family_model

_MARKER = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/Place"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["text"],
        "$defs": {"Place": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
)
SHELL = Tool("run-shell", parameters={"type": "object", "properties": {}})
FREE = Tool("free", parameters={"type": "object"})
VALUES: dict[str, dict[str, Any]] = {
    "weather": {
        "text": 'a "b" </x> \\',
        "count": -2,
        "unit": "C",
        "place": {"name": "Rome"},
        "tags": ["x", "y"],
    },
    "run-shell": {},
    "free": {"any": "thing"},
}
ANSWER = '{"name":"weather <b>","age":3}'


@pytest.fixture(params=[name for name in FORMS if name != "harmony recipient"])
def form_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(name: str, folder: Path) -> Model:
    output_format = FORMS[name].output_format
    markers = [text for text in FORMATS[output_format].markers if _MARKER.fullmatch(text)]
    if name == "mistral list":
        markers.remove("[ARGS]")
    return family_model(folder, markers, SIGNS[output_format])


def accepts(model: Model, grammar: Grammar, text: str) -> bool:
    """Whether a whole text is in the language of a grammar."""
    ids = model.text.encode(text, special=True)
    matcher = grammar.copy()._matcher
    count = matcher.validate_tokens(ids)
    if count < len(ids):
        print("refused behind", repr(model.text.decode(ids[:count])))
        return False
    return bool(matcher.consume_tokens(ids) and matcher.is_accepting())


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    text = FORMS[name].write_calls(calls).replace("\x00", "")
    return text.removesuffix("<|call|>") if FORMS[name].output_format == "harmony" else text


def answer_of(name: str) -> str:
    is_harmony = FORMS[name].output_format == "harmony"
    return f"<|channel|>final<|message|>{ANSWER}" if is_harmony else ANSWER


def test_calls_and_answers_are_allowed_and_nothing_else(form_name: str, tmp_path: Path) -> None:
    model = model_of(form_name, tmp_path)
    grammar, _ = compile_answer_or_calls(model, SCHEMA, [WEATHER, SHELL, FREE])
    assert grammar.warnings == ()
    for tool, values in VALUES.items():
        assert accepts(model, grammar, written(form_name, [(tool, values)])), tool
    assert accepts(model, grammar, written(form_name, [("weather", {"text": "a"})]))
    if FORMS[form_name].output_format != "harmony":
        calls = list(VALUES.items())
        assert accepts(model, grammar, written(form_name, calls))
    assert accepts(model, grammar, answer_of(form_name))
    refused = ["", "Hello", "<think>", written(form_name, [("other", {})])]
    refused += [written(form_name, [("weather", {"text": "a", "other": 1})])]
    refused += [written(form_name, [("weather", {"text": "a", "count": []})])]
    refused += [written(form_name, [("weather", {"text": "a", "unit": "K"})])]
    refused += [written(form_name, [("weather", {"count": 1})])]
    refused += [answer_of(form_name).replace("3", '"3"'), answer_of(form_name) + "\n"]
    for text in refused:
        assert not accepts(model, grammar, text), text


def test_a_model_without_a_template_for_tools_writes_hermes_form(smollm2: Model) -> None:
    grammar, names = compile_answer_or_calls(smollm2, SCHEMA, [WEATHER])
    call = json.dumps({"name": "weather", "arguments": {"text": "a"}})
    assert accepts(smollm2, grammar, f"<tool_call>\n{call}\n</tool_call>")
    assert accepts(smollm2, grammar, ANSWER)
    assert not accepts(smollm2, grammar, call)
    assert names == frozenset()


CALL_LIKE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    "required": ["name", "parameters"],
}


@pytest.mark.parametrize(
    ("schema", "is_bare"),
    [(SCHEMA, True), (CALL_LIKE, False), (dict(ANY_OBJECT), True), ({}, False)],
)
def test_bare_json_is_a_call_unless_the_schema_allows_it(
    tmp_path: Path, schema: dict[str, Any], is_bare: bool
) -> None:
    model = model_of("llama3", tmp_path)
    grammar, names = compile_answer_or_calls(model, schema, [WEATHER])
    assert names == ({"weather"} if is_bare else frozenset())
    call = '{"name": "weather", "parameters": {"text": "a"}}'
    assert accepts(model, grammar, f"<|python_tag|>{call}")
    assert accepts(model, grammar, f"{call}; {call}") == is_bare


def test_parameters_that_are_not_supported_are_free_and_named(smollm2: Model) -> None:
    bad = Tool("bad", parameters={"type": "object", "properties": {"a": {"type": "strange"}}})
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    tools = [bad, Tool("look", parameters=pattern), WEATHER]
    grammar, _ = compile_answer_or_calls(smollm2, SCHEMA, tools)
    first, second = grammar.warnings
    assert "bad" in first
    assert "(?=a)b" in second
    for name, values, allowed in (("bad", {"x": 1}, True), ("look", {"a": "c"}, True)):
        call = json.dumps({"name": name, "arguments": values})
        assert accepts(smollm2, grammar, f"<tool_call>\n{call}\n</tool_call>") == allowed
    call = json.dumps({"name": "weather", "arguments": {"text": 1}})
    assert not accepts(smollm2, grammar, f"<tool_call>\n{call}\n</tool_call>")
