"""Calls of strict tools follow their schemas in every form; all other text stays free."""

import codecs
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch
from server.conftest import serving

from kvkeep.chat import anthropic_tools, openai_chat, openai_responses, openai_tools
from kvkeep.chat.messages import Chat, Message, TextPart, Tool
from kvkeep.chat.output import CallEnded, GeneratedCall
from kvkeep.chat.output_reader import OutputReader
from kvkeep.model import Model
from kvkeep.server.answer_grammar import compile_answer
from kvkeep.server.strict_calls import StrictCalls
from kvkeep.session.sampling import Constraint, Sampling
from tests.chat.api_answers import APIS, form_cases, streams
from tests.chat.written_answers import FORMS
from tests.scripted_model import ScriptedConstraint, ScriptedEngine, family_model
from tests.server.test_call_grammar import model_of, written

# With choices as Pydantic writes them.
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/Unit"},
        "detail": {"anyOf": [{"enum": ["low", "high"], "type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
    "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
}
# Without free text, which random tokens would hardly end.
SWITCH = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["on", "off"]},
        "hours": {"enum": [3, 12]},
        "quiet": {"type": "boolean"},
    },
    "required": ["mode", "quiet"],
}
WEATHER = Tool("weather", parameters=CITY, strict=True)
FREE = Tool("look_up", parameters=CITY)
QUESTION = Chat((Message("user", (TextPart("How is the weather?"),)),), (WEATHER, FREE))
ROME = ("weather", {"city": "Rome", "unit": "C"})
# Those whose markers are neither tags nor control tokens are not followed.
FOLLOWED = [
    name
    for name in FORMS
    if FORMS[name].output_format not in ("functionary", "gemma3", "command-r")
]


def constraint_of(model: Model, chat: Chat = QUESTION) -> Constraint:
    prompt = model.renderer.render(chat)
    constraint = compile_answer(model, chat).constraint(model, prompt)
    assert constraint is not None
    return constraint


def refused_at(model: Model, constraint: Constraint, ids: Sequence[int]) -> int | None:
    """Return the first index of a token that a constraint does not allow; None if there is none."""
    for place, token in enumerate(ids):
        if constraint.masked(torch.zeros(model.text.vocab_size))[token] != 0.0:
            return place
        constraint.accept(token)
    return None


@pytest.mark.parametrize("name", FOLLOWED)
def test_arguments_of_strict_tools_must_follow_the_schema(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)

    def refuses(text: str) -> bool:
        ids = model.text.encode(text, special=True)
        return refused_at(model, constraint_of(model), ids) is not None

    for detail in ({}, {"detail": "low"}, {"detail": None}):
        assert not refuses(written(name, [("weather", {**ROME[1], **detail})])), detail
    for wrong in ({"unit": "K"}, {"detail": "medium"}, {"other": 1}):
        assert refuses(written(name, [("weather", {**ROME[1], **wrong})])), wrong
    for values in ({"city": "Rome"}, {"unit": "C"}, {}):
        assert refuses(written(name, [("weather", values)])), values
    for values in ({"city": "Rome", "unit": "K"}, {"other": 3}):  # of a tool that is not strict
        assert not refuses(written(name, [("look_up", values)])), values


@pytest.mark.parametrize("name", FOLLOWED)
def test_text_around_calls_is_free(name: str, tmp_path: Path) -> None:
    model, form = model_of(name, tmp_path), FORMS[name]
    call = written(name, [ROME])
    text = 'The weather? <tool_call> and ```json are markers.\n{"name": "weather"}\n'
    beginning = text if form.text_first and form.output_format != "harmony" else ""
    for answer in (f"{beginning}{call}", f"{call}\n{text}", f"{beginning}{call}\n{text}{call}"):
        assert may_be_written(model, constraint_of(model), answer), answer


def may_be_written(model: Model, constraint: Constraint, answer: str) -> bool:
    """Whether a constraint allows an answer, and its end."""
    ids = model.text.encode(answer, special=True)
    return refused_at(model, constraint, [*ids, model.end_token_ids[0]]) is None


FREE_TEXTS = (
    ("hermes", "In <tool_call> I write the weather."),
    ("hermes", '<tool_call>\n{"name": "the_weather", "arguments": {\n"x": 1}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "look_up", "arguments": {"x": "weather",\n"y": 1}}\n'),
    ("hermes", '<tool_call>\n{"name": "weather station", "arguments": {"x": 1}}\n</tool_call>'),
    ("hermes", '{"name": "weather station", "id": 3}'),
    ("hermes", '{"name": "weather", "description": "Tells it."}'),
    ("hermes", '[{"name": "weather", "description": "Tells it."}]'),
    ("llama3", '{"name": "weather", "id": 3}'),
    ("llama3", 'Sure: {"name": "weather", "parameters": {"x": 3}}'),
    ("gemma3 json", '```json\n{"weather": "sunny"}\n```'),
    ("gemma3 json", "```tool_code\nweather = get()\n```"),
    ("command-r", "Action: look at the weather."),
    ("qwen3-coder", "The tag <function=weather> is one, and <function=weather>."),
    ("qwen3-coder", "You write <function=weather> <b>bold</b> or <function=weather> </p>"),
    ("llama3", "Then:\n<function=weather>\n<b>x"),
    ("llama3", "Then:\n<function=weather>"),
    ("qwen3-coder", "You write <function=weather"),
    ("mistral", "[TOOL_CALLS]weathernews[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]weather not found"),
    ("mistral", "[TOOL_CALLS]weather[1]"),
    ("llama3", "Then:\n<function=weather> is what I write."),
    ("qwen3-coder", "<tool_call>\n<function=weather map>\n</function>\n</tool_call>"),
    ("glm", "<tool_call>weather\nis what I look up.</tool_call>"),
    ("gemma4", "<|tool_call>call:weather is it.<tool_call|>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather is it."),
    ("mistral", "[TOOL_CALLS]weather is it."),
    ("harmony", "<|channel|>analysis<|message|>I write to=functions.weather now.<|end|>"),
    ("harmony", "<|channel|>commentary<|message|>I look at the weather.<|end|>"),
)


@pytest.mark.parametrize(("name", "text"), FREE_TEXTS)
def test_text_that_only_looks_like_a_call_is_free(name: str, text: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    assert may_be_written(model, constraint_of(model), text)


DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
# Calls as the reader takes them, in other bytes than the template's. Words in capitals stand for
# the arguments: see `with_arguments`.
CALLS = (
    ("hermes", '<tool_call>\n{ "name": "weather", "arguments": JSON}\n</tool_call>'),
    ("hermes", '<tool_call>\n{\n  "name" : "weather",\n  "arguments" : JSON\n}\n</tool_call>'),
    ("hermes", '<tool_call> \r\n\n{"name": "weather","arguments":JSON}</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "weather", "arguments": JSON}]\n</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "look_up"}, {"name": "weather", "arguments": JSON}]\n'),
    ("hermes", '<tool_call>\n{"id": 3, "name": "weather", "parameters": JSON}\n</tool_call>'),
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "id": "c1", "type": "function", "arguments": JSON}\n',
    ),
    ("qwen3-coder", "So: <function=weather>\nJSON</function>"),
    ("hermes", '<tool_call>\n{"arguments": {"x": 1}, "name": "weather", "arguments": JSON}\n'),
    ("hermes", '<tool_call>\n{"type": "function", "name": "weather", "arguments": JSON}\n'),
    ("hermes", '<tool_call>\n{"function": {"name": "functions.weather", "arguments": JSON}}\n'),
    ("hermes", '{\n  "name": "weather",\n  "arguments": JSON\n}'),
    ("hermes", '```json\n{"name": "weather", "arguments": JSON}\n```'),
    ("llama3", '{"type": "function", "name": "weather", "parameters": JSON}'),
    ("llama3", 'Sure:\n{"name": "weather", "parameters": JSON}'),
    ("llama3", '<|python_tag|>{"type": "function", "name": "weather", "parameters": JSON}'),
    ("nemotron2", '<tool_call>\n{"name": "weather", "arguments": JSON}\n</tool_call>'),
    ("mistral", "[TOOL_CALLS] weather[ARGS]JSON"),
    ("mistral", "[TOOL_CALLS]weather JSON"),
    ("apertus", '<|tools_prefix|> [ {"weather" : JSON}]<|tools_suffix|>'),
    ("deepseek", f"{DEEPSEEK_CALL}weather<｜tool▁sep｜>\nJSON<｜tool▁call▁end｜>"),
    ("deepseek", f"{DEEPSEEK_CALL}function<｜tool▁sep｜>weather\n\n```json\nJSON\n```"),
    ("deepseek", "<｜tool▁calls▁begin｜>\n\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>JSON"),
    ("deepseek", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"),
    ("harmony", f"{ANALYSIS}<|channel|>commentary to=functions.weather <|message|>\n JSON"),
    ("harmony", "<|channel|>analysis to=functions.weather<|message|>JSON"),
    ("qwen3-coder", "<tool_call><function=weather>TAGS</function></tool_call>"),
    ("qwen3-coder", "<tool_call>\n\n<function= weather >\n\nTAGS</function>\n</tool_call>"),
    ("qwen3-coder", "So: <function=weather>\nTAGS</function>"),
    ("llama3", "So:\n<function=weather> JSON</function>"),
    ("minimax", '<minimax:tool_call><invoke name="weather">INVOKE</invoke>'),
    ("glm", "<tool_call>\nweather\n\nKEYS</tool_call>"),
    ("gemma4", "<|tool_call>call:weather {GEMMA}<tool_call|>"),
    ("lfm2", "<|tool_call_start|>weather(PYTHON)<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[look_up(x=1), weather(PYTHON)]<|tool_call_end|>"),
    ("olmo3", "<function_calls>\n[weather(PYTHON)]\n</function_calls>"),
)


def test_calls_are_held_however_they_are_written(tmp_path: Path) -> None:
    models: dict[str, Model] = {}
    for name, text in CALLS:
        model = models.setdefault(name, model_of(name, tmp_path / name))
        for values, is_allowed in ((ROME[1], True), ({"x": 1}, False), ({}, False)):
            call = with_arguments(text, values)
            read = calls_in(model, call)[-1]
            found = read.name, json.loads(read.arguments), read.complete
            assert found == ("weather", values, True), call
            assert may_be_written(model, constraint_of(model), call) == is_allowed, call


def with_arguments(text: str, values: dict[str, Any]) -> str:
    """Return a text of `CALLS` with arguments, in each way in which forms write them."""
    names = {
        "JSON": json.dumps(values),
        "TAGS": "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items()),
        "INVOKE": "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in values.items()),
        "KEYS": "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
        ),
        "GEMMA": ",".join(
            f'{k}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{k}:{v}" for k, v in values.items()
        ),
        "PYTHON": ", ".join(f"{k}={v!r}" for k, v in values.items()),
    }
    for written_name, arguments in names.items():
        text = text.replace(written_name, arguments)
    return text


def calls_in(model: Model, text: str) -> list[GeneratedCall]:
    """Return the calls that are read in an answer."""
    output_format, control_text = model.renderer.output_format, model.text.control_text
    reader = OutputReader(output_format, QUESTION.callable_tools, control_text=control_text)
    for token in model.text.encode(text, special=True):
        is_control = model.text.is_control(token)
        reader.push([token if is_control else model.text.decode([token])])
    reader.finish()
    return reader.output.calls


BAD_CALL = '<tool_call>\n{"name": "weather", "arguments": {"x": 1}}\n</tool_call>'


def test_a_mention_of_a_reasoning_marker_is_text(tmp_path: Path) -> None:
    model = family_model(tmp_path, [], text_markers=["<tool_call>", "</tool_call>"])
    look_up = '<tool_call>\n{"name": "look_up", "arguments": {"x": "<think>"}}\n</tool_call>\n'
    for text in ("I use <think> tags.\n", look_up, "<think>\nHm.\n</think>\n", "<think>\nHm.\n"):
        assert not may_be_written(model, constraint_of(model), text + BAD_CALL), text
    assert may_be_written(model, constraint_of(model), f"<think>\nMaybe {BAD_CALL}")


RAW_VALUES = (
    (
        "qwen3-coder",
        "<tool_call>\n<function=look_up>\n<parameter=text>\nWrite <tool_call>\n"
        "<function=weather>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "so.\n</parameter>\n</function>\n</tool_call>",
    ),
    ("hermes", f'<tool_call>\n{{"name": "look_up", "arguments": {{"x": {json.dumps(BAD_CALL)}}}}}'),
)


@pytest.mark.parametrize(("name", "text"), RAW_VALUES)
def test_values_of_free_tools_have_no_calls(name: str, text: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    assert [call.name for call in calls_in(model, text)] == ["look_up"]
    assert may_be_written(model, constraint_of(model), text)


def test_white_space_before_the_arguments_of_a_message_has_a_limit(tmp_path: Path) -> None:
    model = model_of("harmony", tmp_path)
    header = "<|channel|>commentary to=functions.weather <|message|>"
    assert may_be_written(model, constraint_of(model), f'{header}\n {{"city":"x","unit":"C"}}')
    ids = model.text.encode(header + " \n" * 50, special=True)
    place = refused_at(model, constraint_of(model), ids)
    assert place is not None
    assert place < len(ids) - 50


def test_a_longer_name_of_another_tool_is_free(tmp_path: Path) -> None:
    model = model_of("hermes", tmp_path)
    chat = replace(QUESTION, tools=(WEATHER, Tool("weather_map", parameters=CITY)))
    call = '<tool_call>\n{"name": "NAME", "arguments": {"zoom": 3,\n"x": 1}}\n</tool_call>'
    for name, is_free in (("weather_map", True), ("weather", False)):
        constraint = constraint_of(model, chat)
        assert may_be_written(model, constraint, call.replace("NAME", name)) == is_free


def test_markers_that_are_text_are_none_in_the_reasoning(tmp_path: Path) -> None:
    markers = ["<tool_call>", "</tool_call>"]
    model = family_model(tmp_path, ["<think>", "</think>"], text_markers=markers)
    call = '<tool_call>\n{"name": "weather", "arguments": {"x": 1}}\n</tool_call>'
    assert may_be_written(model, constraint_of(model), f"<think>\nMaybe {call}?\n</think>\nNo.")
    assert not may_be_written(model, constraint_of(model), f"<think>\nHm.\n</think>\n{call}")


def test_the_last_token_of_a_name_cannot_end_the_call(smollm2: Model) -> None:
    """Such a token of the default model is `"}`."""
    call = '<tool_call>\n{"name": "weather"}\n</tool_call>'
    ids = smollm2.text.encode(call)
    assert any(smollm2.text.token_bytes(token) == b'"}' for token in ids)
    assert not may_be_written(smollm2, constraint_of(smollm2), call)


RECURSIVE = {"V": {"anyOf": [*([{"$ref": "#/$defs/V"}] * 8), {"type": "string"}]}}
DOUBLED = {
    "V": {"anyOf": [{"$ref": "#/$defs/V40"}, {"$ref": "#/$defs/V40"}]},
    "V0": {"enum": ["on", "off"]},
    **{f"V{n + 1}": {"anyOf": [{"$ref": f"#/$defs/V{n}"}] * 2} for n in range(40)},
}


@pytest.mark.parametrize("definitions", [RECURSIVE, DOUBLED], ids=["recursive", "doubled"])
def test_references_take_no_time(definitions: dict[str, Any], tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/V"}},
        "$defs": definitions,
    }
    tool = Tool("weather", parameters=schema, strict=True)
    start = time.thread_time()
    constraint_of(model_of("qwen3-coder", tmp_path), replace(QUESTION, tools=(tool,)))
    assert time.thread_time() - start < 20


def test_no_bare_call_begins_where_an_answer_goes_on(tmp_path: Path) -> None:
    model = model_of("hermes", tmp_path)
    call = '{"name": "weather", "arguments": {"x": 1}}'
    assert not may_be_written(model, constraint_of(model), call)
    begun = replace(
        QUESTION, messages=(*QUESTION.messages, Message("assistant", (TextPart("So: "),)))
    )
    prompt = replace(model.renderer.render(begun), continues=True)
    constraint = compile_answer(model, begun).constraint(model, prompt)
    assert constraint is not None
    assert may_be_written(model, constraint, call)


@pytest.mark.parametrize("name", FOLLOWED)
def test_random_calls_follow_the_schema(name: str, tmp_path: Path) -> None:
    """A call's beginning is given, and its other tokens are any that are allowed."""
    model, random = model_of(name, tmp_path), Random(name)
    chat = replace(QUESTION, tools=(Tool("switch", parameters=SWITCH, strict=True), FREE))
    ids = model.text.encode(written(name, [("switch", {"mode": "on"})]), special=True)
    begun = next(n for n in range(len(ids)) if "mode" in model.text.decode(ids[:n]))
    for _ in range(5):
        (call,) = random_calls(model, chat, ids[:begun], random)
        assert (call.name, call.complete) == ("switch", True)
        jsonschema.validate(json.loads(call.arguments), SWITCH)


def random_calls(
    model: Model, chat: Chat, beginning: Sequence[int], random: Random
) -> list[GeneratedCall]:
    """Return the calls in an answer of random tokens behind its beginning, up to the first end."""
    constraint, zeros = constraint_of(model, chat), torch.zeros(model.text.vocab_size)
    control_text = model.text.control_text
    reader = OutputReader(
        model.renderer.output_format, chat.callable_tools, control_text=control_text
    )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for place in range(2000):
        allowed = (constraint.masked(zeros) == 0.0).nonzero().flatten().tolist()
        token = beginning[place] if place < len(beginning) else random.choice(allowed)
        constraint.accept(token)
        is_control = model.text.is_control(token)
        piece = token if is_control else decoder.decode(model.text.token_bytes(token))
        if any(isinstance(event, CallEnded) for event in reader.push([piece])):
            break
    reader.finish()
    return reader.output.calls


@pytest.mark.parametrize("strict", [True, False, None])
def test_every_api_takes_strict(strict: bool | None) -> None:
    fields = {"name": "weather"} if strict is None else {"name": "weather", "strict": strict}
    (nested,) = openai_tools.parse_tools([{"type": "function", "function": fields}])
    (flat,) = openai_tools.parse_tools([{"type": "function", **fields}])
    (messages,) = anthropic_tools.parse_tools([{**fields, "input_schema": CITY}])
    assert [tool.strict for tool in (nested, flat, messages)] == [bool(strict)] * 3
    for written_back in (
        openai_chat.format_tool(nested)["function"],
        *openai_responses.format_tools([flat]),
        anthropic_tools.format_tool(messages),
    ):
        assert written_back.get("strict", False) is bool(strict)


@pytest.mark.parametrize(("name", "api"), form_cases(FOLLOWED))
def test_answers_with_such_calls_are_the_same(name: str, api: str, tmp_path: Path) -> None:
    form = FORMS[name]
    model = model_of(name, tmp_path)
    text = "Let me see.\n" if form.text_first and form.output_format != "harmony" else ""
    parts = [("call", ROME)] if not text else [("text", text.strip()), ("call", ROME)]
    answer = f"{text}{form.write_calls([ROME])}".replace("\x00", "")
    options = {"checks_constraints": True, "settings": {"max_kv_size": 4096}}
    engine = ScriptedEngine(model, lambda prompt: answer, **options)
    with serving(engine) as server, server.client() as client:
        assert APIS[api](client, QUESTION, streams(name, api, 0)) == parts


def test_what_another_constraint_forces_ends_a_call(tmp_path: Path) -> None:
    """Such as the budget of the reasoning, in which a model may write calls too."""
    model = model_of("hermes", tmp_path)
    end = model.text.encode("</think>", special=True)
    ids = model.text.encode('<tool_call>\n{"name": "weather"', special=True) + end
    strict = compile_answer(model, QUESTION).strict
    assert strict is not None
    within = ScriptedConstraint(ids, None)
    constraint = StrictCalls(model.text, model.renderer.output_format, strict, within)
    assert refused_at(model, constraint, ids) is None


@pytest.mark.parametrize("strict", [False, True])
def test_the_default_model_completes_a_call_by_the_schema(smollm2: Model, strict: bool) -> None:
    """It is given the beginning, as it writes no call of its own accord."""
    chat = replace(QUESTION, tools=(replace(WEATHER, strict=strict),))
    prompt = smollm2.renderer.render(chat)
    constraint = compile_answer(smollm2, chat).constraint(smollm2, prompt)
    beginning = smollm2.text.encode('<tool_call>\n{"name": "weather", "arguments":')
    session = smollm2.session(max_kv_size=2048)
    session.feed([*prompt.ids, *beginning])
    if constraint is not None:
        for token in beginning:
            constraint.accept(token)
    text = "".join(session.stream(80, Sampling(constraint=constraint)))
    assert begins_with_json_of_the_schema(text) == strict


def begins_with_json_of_the_schema(text: str) -> bool:
    try:
        value, _ = json.JSONDecoder().raw_decode(text.strip())
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(CITY).is_valid(value)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_server_holds_calls_to_the_schema(path: str, tmp_path: Path) -> None:
    """The model is made to write a call without a required argument, which fails if it is held."""
    model = model_of("hermes", tmp_path)
    answer = written("hermes", [("weather", {"city": "Rome"})])
    options = {"checks_constraints": True, "settings": {"max_kv_size": 4096}}
    engine = ScriptedEngine(model, lambda prompt: answer, **options)
    question = [{"role": "user", "content": "How is the weather?"}]
    with serving(engine) as server, server.client() as client:
        for strict, status in ((False, 200), (True, 500)):
            function = {"name": "weather", "parameters": CITY, "strict": strict}
            tools = {
                "/v1/chat/completions": [{"type": "function", "function": function}],
                "/v1/responses": [{"type": "function", **function}],
                "/v1/messages": [{"name": "weather", "input_schema": CITY, "strict": strict}],
            }[path]
            key = "input" if path == "/v1/responses" else "messages"
            body = {"model": "x", key: question, "tools": tools, "max_tokens": 200}
            assert client.post(path, json=body).status_code == status, strict
