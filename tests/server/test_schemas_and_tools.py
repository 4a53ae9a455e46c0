"""Requests with both tools and a JSON schema: the answer is calls, or JSON by the schema."""

import asyncio
import json
import threading
from typing import Any
from unittest import mock

import httpx
import pytest

from kvkeep.chat.messages import Chat, Message, TextPart, Tool
from kvkeep.model import Model
from kvkeep.server.grammar import Grammar
from tests.chat.api_answers import APIS
from tests.server.conftest import RunningServer
from tests.server.scripted_answers import scripted_answers

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", parameters=CITY)
QUESTION = Chat((Message("user", (TextPart("How is the weather?"),)),), (WEATHER,))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "about": {"type": "string"}},
    "required": ["name", "about"],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("output_format", ["hermes", "llama3", "mistral", "qwen3-coder"])
@pytest.mark.parametrize("api", APIS)
def test_a_call_inside_of_the_schemas_json_is_text(
    server: RunningServer, smollm2: Model, api: str, output_format: str
) -> None:
    answer = json.dumps({"name": "weather", "about": f"{CALL}<think>[TOOL_CALLS]</think>"})
    with server.client() as client:
        for stream in (False, True):
            with scripted_answers(smollm2, answer, output_format=output_format):
                parts = APIS[api](client, QUESTION, stream, PERSON)
            assert parts == [("text", answer)], stream


@pytest.mark.parametrize("api", APIS)
def test_without_a_schema_json_is_a_call_only_in_the_forms_of_bare_json(
    server: RunningServer, smollm2: Model, api: str
) -> None:
    answer = '{"name": "weather", "parameters": {"city": "Rome"}}'
    with server.client() as client:
        for output_format, parts in (
            ("hermes", [("text", answer)]),
            ("mistral", [("text", answer)]),
            ("llama3", [("call", ("weather", {"city": "Rome"}))]),
        ):
            with scripted_answers(smollm2, answer, output_format=output_format):
                assert APIS[api](client, QUESTION, True) == parts


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
