"""Requests with both tools and a JSON schema: the answer is calls, or JSON by the schema."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from kvkeep.chat.formats.registry import FORMATS
from kvkeep.chat.messages import Chat, Message, TextPart, Tool
from kvkeep.server.grammar import Grammar
from tests.chat.api_answers import APIS, form_cases, streams
from tests.chat.test_families import SIGNS
from tests.chat.written_answers import FORMS
from tests.scripted_model import ScriptedEngine, family_model
from tests.server.conftest import RunningServer, ScriptedServer, serving

_MARKER = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", parameters=CITY)
QUESTION = Chat((Message("user", (TextPart("How is the weather?"),)),), (WEATHER,))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "about": {"type": "string"}},
    "required": ["name", "about"],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


FORMATS_OF_APIS = dict(zip(APIS, ("hermes", "llama3", "mistral", "qwen3-coder"), strict=True))


@pytest.mark.parametrize(
    ("api", "output_format"),
    [
        pytest.param(api, name, marks=() if FORMATS_OF_APIS[api] == name else pytest.mark.slow)
        for api in APIS
        for name in FORMATS_OF_APIS.values()
    ],
)
def test_a_call_inside_of_the_schemas_json_is_text(
    scripted: ScriptedServer, api: str, output_format: str
) -> None:
    answer = json.dumps({"name": "weather", "about": f"{CALL}<think>[TOOL_CALLS]</think>"})
    scripted.write(answer, output_format=output_format)
    with scripted.client() as client:
        for stream in (False, True):
            assert APIS[api](client, QUESTION, stream, PERSON) == [("text", answer)], stream


@pytest.mark.parametrize("api", APIS)
def test_without_a_schema_json_is_a_call_only_in_the_forms_of_bare_json(
    scripted: ScriptedServer, api: str
) -> None:
    answer = '{"name": "weather", "parameters": {"city": "Rome"}}'
    with scripted.client() as client:
        for output_format, parts in (
            ("hermes", [("call", ("weather", {"city": "Rome"}))]),
            ("mistral", [("text", answer)]),
            ("llama3", [("call", ("weather", {"city": "Rome"}))]),
        ):
            scripted.write(answer, output_format=output_format)
            assert APIS[api](client, QUESTION, True) == parts


ROME = ("call", ("weather", {"city": 'the "City"'}))
REASONING = ("reasoning", "Hm, weather.")


@pytest.mark.parametrize(
    ("name", "api"),
    form_cases(
        name
        for name in FORMS
        if name not in ("mistral list", "mistral id", "harmony recipient", "deepseek fenced")
    ),
)
def test_the_answer_is_calls_or_json_by_the_schema(name: str, api: str, tmp_path: Path) -> None:
    """The grammar allows both in each form, and every API gives them as what they are."""
    form = FORMS[name]
    is_harmony = form.output_format == "harmony"
    markers = [text for text in FORMATS[form.output_format].markers if _MARKER.fullmatch(text)]
    model = family_model(tmp_path, markers, SIGNS[form.output_format])
    answer = json.dumps({"name": "weather", "about": "a <b> c"}, separators=(",", ":"))
    header = "<|channel|>final<|message|>" if is_harmony else ""
    call = form.write_calls([ROME[1]])
    reasoning = f"{form.reasoning[0]}{REASONING[1]}{form.reasoning[1]}"
    reasoning += "<|start|>assistant" if is_harmony else ""
    cases = [
        (f"{reasoning}{call}", [REASONING, ROME]),
        (f"{reasoning}{header}{answer}", [REASONING, ("text", answer)]),
    ]
    if not is_harmony:  # whose answers begin with reasoning
        cases += [(call, [ROME]), (answer, [("text", answer)])]
    start = form.reasoning[0].replace("\x00", "")
    if start not in markers and not is_harmony:  # a text that only prompts have
        cases = cases[2:]
    answers: list[str] = []
    options = {"checks_constraints": True, "settings": {"max_kv_size": 4096}}
    engine = ScriptedEngine(model, lambda prompt: answers.pop(0), **options)
    with serving(engine) as server, server.client() as client:
        for number, (text, parts) in enumerate(cases):
            stream = streams(name, api, number)
            answers.append(text.replace("\x00", ""))
            assert APIS[api](client, QUESTION, stream, PERSON) == parts, stream


def test_a_forced_call_in_channels_has_its_header(tmp_path: Path) -> None:
    form = FORMS["harmony"]
    markers = [text for text in FORMATS["harmony"].markers if _MARKER.fullmatch(text)]
    model = family_model(tmp_path, markers, SIGNS["harmony"])
    call = form.write_calls([ROME[1]]).replace("\x00", "")
    text = f"{form.reasoning[0]}{REASONING[1]}{form.reasoning[1]}<|start|>assistant{call}"
    options = {"checks_constraints": True, "settings": {"max_kv_size": 4096}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    fields = {"tools": [tool], "tool_choice": "required", "max_tokens": 99, "temperature": 0}
    engine = ScriptedEngine(model, lambda prompt: text.replace("\x00", ""), **options)
    with serving(engine) as server, server.client() as client:
        request = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        (choice,) = client.post("/v1/chat/completions", json=request).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "weather"
    assert json.loads(made["function"]["arguments"]) == ROME[1][1]
    assert not choice["message"].get("content")
    assert choice["message"]["reasoning_content"] == REASONING[1]


@pytest.mark.parametrize("choice", ["none", "required"])
def test_the_choice_of_tools_leaves_one_of_both(server: RunningServer, choice: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    fields = {"tools": [tool], "tool_choice": choice, "max_tokens": 60, "temperature": 0}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={**body("", **fields)})
    message = response.json()["choices"][0]["message"]
    if choice == "none":
        assert "tool_calls" not in message
        assert message["content"].startswith('{"name":"')
    else:
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        assert not message["content"]


@pytest.mark.parametrize("seed", range(4))
def test_the_default_model_writes_one_of_both(server: RunningServer, seed: int) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    fields = {"tools": [tool], "max_tokens": 200, "temperature": 1.5, "seed": seed}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={**body("", **fields)})
    choice = response.json()["choices"][0]
    message = choice["message"]
    if choice["finish_reason"] == "tool_calls":
        for call in message["tool_calls"]:
            assert set(json.loads(call["function"]["arguments"])) == {"city"}
        assert not message["content"]
    elif choice["finish_reason"] == "stop":
        assert set(json.loads(message["content"])) == {"name", "about"}


def body(path: str, **fields: Any) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    messages = [{"role": "user", "content": "Hi"}]
    if path == "/completion":
        return {"prompt": "Hi", "n_predict": 4, "json_schema": PERSON}
    return {"messages": messages, "max_tokens": 4, "response_format": named, **fields}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"n": 3}),
        ("/v1/chat/completions", {"n": 2, "stream": True}),
        ("/completion", {}),
    ],
)
def test_a_schema_is_compiled_once_and_not_in_the_event_loop(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    compiled: list[bool] = []

    def in_event_loop() -> bool:
        try:
            return asyncio.get_running_loop() is not None
        except RuntimeError:
            return False

    def from_schema(*arguments: Any) -> Grammar:
        compiled.append(in_event_loop() or threading.current_thread() is threading.main_thread())
        return original(*arguments)

    original = Grammar.from_schema
    with mock.patch.object(Grammar, "from_schema", from_schema), server.client() as client:
        response: httpx.Response = client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    assert compiled == [False]


def test_each_choice_follows_the_schema_for_itself(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with server.client() as client:
        fields = {"n": 4, "temperature": 2.0, "max_tokens": 20, "response_format": named}
        response = client.post("/v1/chat/completions", json=body("", **fields)).json()
    for choice in response["choices"]:
        assert json.loads(choice["message"]["content"])["n"] in (1, 22, 333)


def test_a_required_call_is_free_where_parameters_are_not_supported(server: RunningServer) -> None:
    """The call's name, and the arguments of other tools, stay constrained."""
    number = {"type": "integer", "minimum": -(10**30), "maximum": 10**300}
    huge = {"type": "object", "properties": {"n": number}}
    functions = [{"name": "huge", "parameters": huge}, {"name": "weather", "parameters": CITY}]
    tools = [{"type": "function", "function": function} for function in functions]
    fields = {"tools": tools, "tool_choice": "required", "max_tokens": 4}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=body("", **fields))
    assert response.status_code == 200, response.text
    assert "the parameters of huge are not followed" in response.headers["X-Kvkeep-Warning"]
    assert "weather" not in response.headers["X-Kvkeep-Warning"]
