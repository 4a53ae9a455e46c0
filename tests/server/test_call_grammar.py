"""The grammar of an answer that is calls or JSON, in every form of calls."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvkeep.chat.formats.registry import FORMATS
from kvkeep.chat.messages import (
    Chat,
    Message,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from kvkeep.chat.openai_tools import parse_tools
from kvkeep.chat.output_reader import OutputReader
from kvkeep.model import Model
from kvkeep.server.answer_grammar import compile_answer, compile_answer_or_calls
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from tests.chat.templates import MISTRAL_NEMO, QWEN25
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
WEATHER_VALUES: dict[str, Any] = {
    "text": 'a "b" </x> \\',
    "count": -2,
    "unit": "C",
    "place": {"name": "Rome"},
    "tags": ["x", "y"],
}
VALUES: dict[str, dict[str, Any]] = {
    "weather": WEATHER_VALUES,
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
    for left_out in (
        ["count", "unit"],
        ["unit", "tags"],
        ["count", "place"],
        list(WEATHER_VALUES)[1:],
    ):
        some = {key: value for key, value in WEATHER_VALUES.items() if key not in left_out}
        assert accepts(model, grammar, written(form_name, [("weather", some)])), left_out
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


def test_markers_are_tokens_where_the_vocabulary_has_them_as_text(tmp_path: Path) -> None:
    """Qwen 2.5 has `<tool_call>` as a token that is not special."""
    markers = ["<tool_call>", "</tool_call>"]
    model = family_model(tmp_path, ["<think>", "</think>"], text_markers=markers)
    grammar, _ = compile_answer_or_calls(model, SCHEMA, [WEATHER])
    call = written("hermes", [("weather", {"text": "a"})])
    assert model.text.encode(markers[0], special=True) == model.text.encode(call, special=True)[:1]
    assert accepts(model, grammar, call)
    assert accepts(model, grammar, ANSWER)


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


def random_text(model: Model, grammar: Grammar, seed: int) -> list[int]:
    """Return a random text of a grammar, as tokens; empty if it does not end soon."""
    random, matcher = Random(seed), grammar.copy()
    ids: list[int] = []
    logits = torch.zeros(model.text.vocab_size)
    closing = [i for text in "\"'}])<>/\n" for i in model.text.encode(text)]
    closing += [i for i in range(model.text.vocab_size) if model.text.is_control(i)]
    for _ in range(600):
        allowed = (matcher.masked(logits) == 0).nonzero().flatten().tolist()
        if model.end_token_ids[0] in allowed:
            return ids
        likely = [token for token in allowed if token in closing]
        ids.append(random.choice(likely if likely and random.random() < 0.6 else allowed))
        matcher.accept(ids[-1])
    return []


SIMPLE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "number"},
        "unit": {"enum": ["C", "F"]},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text"],
}
TYPES = {"text": str, "count": (int, float), "unit": str, "flag": bool, "tags": list}


def pieces_of(model: Model, ids: list[int]) -> list[str | int]:
    """Return texts, and control tokens as they are."""
    pieces: list[str | int] = []
    for is_control, group in itertools.groupby(ids, model.text.is_control):
        tokens = list(group)
        pieces += tokens if is_control else [model.text.decode(tokens)]
    return pieces


def test_all_that_the_grammar_allows_is_read_as_calls_or_as_the_answer(
    form_name: str, tmp_path: Path
) -> None:
    model = model_of(form_name, tmp_path)
    tools = [Tool("weather", parameters=SIMPLE), SHELL]
    grammar, names = compile_answer_or_calls(model, SCHEMA, tools)
    read = Counter[str]()
    for seed in range(60):
        ids = random_text(model, grammar, seed)
        reader = OutputReader(
            model.renderer.output_format,
            tools,
            control_text=model.text.control_text,
            schema_calls=names,
            constrained=True,
        )
        reader.push(pieces_of(model, ids))
        reader.finish()
        output, text = reader.output, model.text.decode(ids)
        if not ids:
            read["unfinished"] += 1
        elif output.calls:
            read["calls"] += 1
            assert output.text == "", text
            for call in output.calls:
                assert call.complete, text
                values = json.loads(call.arguments)
                assert set(values) <= (set(TYPES) if call.name == "weather" else set()), text
                assert call.name != "weather" or "text" in values
                for key, value in values.items():
                    assert isinstance(value, TYPES[key]), text
        else:
            read["answers"] += 1
            assert set(json.loads(output.text)) == {"name", "age"}
            assert text.endswith(output.text)
    assert read["calls"] >= 5, read
    assert read["answers"] >= 5, read


def test_parameters_that_are_too_large_together_are_free_and_named(smollm2: Model) -> None:
    names = {f"{number}".zfill(1000): {"type": "string"} for number in range(60)}
    parameters = {"type": "object", "properties": names}
    tools = [Tool(f"tool_{number}", parameters=parameters) for number in range(5)]
    grammar, _ = compile_answer_or_calls(smollm2, SCHEMA, tools)
    assert "too large" in str(grammar.warnings)
    call = json.dumps({"name": "tool_3", "arguments": {"a": 1}})
    assert accepts(smollm2, grammar, f"<tool_call>\n{call}\n</tool_call>")
    assert accepts(smollm2, grammar, ANSWER)


@pytest.mark.parametrize("forced", [True, False])
def test_a_patch_has_a_diff_unless_it_deletes_a_file(smollm2: Model, forced: bool) -> None:
    tools, question = parse_tools([{"type": "apply_patch"}]), Message("user", (TextPart("Hi"),))
    chat = Chat((question,), tools, ToolChoice("required" if forced else "auto"))
    grammar = compile_answer(smollm2, chat, None if forced else SCHEMA).grammar
    assert grammar is not None
    assert grammar.warnings == ()

    def allows(**operation: str) -> bool:
        call = json.dumps({"name": "apply_patch", "arguments": operation})
        return accepts(smollm2, grammar, f"<tool_call>\n{call}\n</tool_call>")

    for kind in ("create_file", "update_file"):
        assert allows(type=kind, path="a.txt", diff="+a")
        assert not allows(type=kind, path="a.txt")
    assert allows(type="delete_file", path="a.txt")


LLAMA3 = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n\\n' }}
    {%- for tool in tools or [] if loop.first %}{{- tool | tojson }}{%- endfor %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}' }}
    {%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
{#- <|python_tag|> #}
"""


def forced_model(name: str, folder: Path, smollm2: Model) -> Model:
    """Return the default model, or one with the template of a family."""
    if name == "default":
        return smollm2
    names = ("INST", "/INST", "TOOL_CALLS", "TOOL_RESULTS", "/TOOL_RESULTS")
    markers = [f"[{marker}]" for marker in names] if name == "mistral" else []
    template = {"qwen2.5": QWEN25, "mistral": MISTRAL_NEMO, "llama3": LLAMA3}[name]
    model = family_model(folder, [*markers, "<|start|>", "<|stop|>", "</s>"])
    (folder / "chat_template.jinja").write_text(template)
    return model


@pytest.mark.parametrize("name", ["default", "qwen2.5", "mistral", "llama3"])
def test_a_forced_call_has_the_bytes_that_the_template_writes(
    name: str, tmp_path: Path, smollm2: Model
) -> None:
    model = forced_model(name, tmp_path, smollm2)
    renderer, tools = model.renderer, (WEATHER, SHELL)
    question = Message("user", (TextPart("Hi"),))
    prompt = renderer.render(Chat((question,), tools)).text
    grammar = compile_answer(model, Chat((question,), tools, ToolChoice("required"))).grammar
    assert grammar is not None
    for tool in tools:
        call = ToolCall("kvkeep007", tool.name, VALUES[tool.name])
        answer = Message("assistant", (call,))
        result = Message("tool", (ToolResult(call.id, (TextPart("sunny"),)),))
        text = str(renderer.render(Chat((question, answer, result), tools)).text)
        written_call = text.removeprefix(prompt).partition("<|im_end|>")[0]
        written_call = written_call.partition("<|stop|>")[0].partition("</s>")[0]
        assert tool.name in written_call
        assert accepts(model, grammar, written_call)
        assert not accepts(model, grammar, written_call.replace(": ", ":"))
        reader = OutputReader(renderer.output_format, tools, lambda: "kvkeep007", forced=True)
        reader.push([written_call])
        reader.finish()
        assert reader.output.message() == answer or name == "mistral"  # its marker is no text
