"""Headers that name the ignored fields of a request; refused fields."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.conftest import RunningServer

from kvkeep.server.notices import Notices

MESSAGES = [{"role": "user", "content": "Hi"}]
IGNORED = "X-Kvkeep-Ignored"
HARMLESS = {
    "model": "smollm2",
    "user": "ada",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "cache_control": {"type": "ephemeral"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/completion": {"prompt": "Hi", "n_predict": 1},
}


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={**BODIES[path], **fields})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named_in_a_header(
    server: RunningServer, path: str, stream: bool
) -> None:
    response = post(server, path, stream=stream, typical_p=0.5, watermark=True, **HARMLESS)
    assert response.status_code == 200
    assert response.headers[IGNORED] == "typical_p, watermark"


@pytest.mark.parametrize("path", BODIES)
def test_harmless_fields_and_neutral_values_are_not_named(server: RunningServer, path: str) -> None:
    neutral = {"typical_p": 1.0, "mirostat": 0, "background": False, "watermark": None, "tags": []}
    response = post(server, path, **HARMLESS, **neutral)
    assert response.status_code == 200
    assert IGNORED not in response.headers


def test_fields_of_nested_objects_are_named_by_their_path(server: RunningServer) -> None:
    stream_options = {"include_usage": True, "include_obfuscation": False, "every": 2}
    response = post(server, "/v1/chat/completions", stream=True, stream_options=stream_options)
    assert response.headers[IGNORED] == "stream_options.every"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "audio", {"voice": "alloy", "format": "wav"}),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
        ("/v1/responses", "background", True),
        ("/v1/responses", "guided_json", {"type": "object"}),
        ("/v1/responses", "grammar", 'root ::= "a"'),
        ("/v1/completions", "guided_choice", ["a"]),
        ("/v1/completions", "json_schema", {"type": "object"}),
        ("/completion", "structured_outputs", {"choice": ["a"]}),
        ("/v1/responses", "conversation", "conv_1"),
        ("/v1/responses", "prompt", {"id": "pmpt_1"}),
    ],
)
def test_fields_that_cannot_be_followed_are_refused(
    server: RunningServer, path: str, field: str, value: Any
) -> None:
    response = post(server, path, **{field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"alignment": "approximate"}, "alignment"),
        ("/v1/chat/completions", {"alignment": {"mode": "x"}}, "alignment.mode"),
        ("/v1/chat/completions", {"alignment": {"min_saved": 3}}, "alignment.mode"),
        ("/v1/messages", {"alignment": {"mode": "exact", "min": 3}}, "alignment.min"),
        ("/v1/responses", {"input": ["x"]}, "input.0"),
        ("/v1/completions", {"prompt": [[1, "x"]]}, "prompt.0.1"),
    ],
)
def test_errors_in_fields_of_several_types_name_the_place(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    """Not the first of the types, which the value was not meant to be."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: ")


def test_chats_name_a_prediction_and_a_prompt(server: RunningServer) -> None:
    prediction = {"type": "content", "content": "Hello"}
    response = post(server, "/v1/chat/completions", prediction=prediction, prompt="Hi")
    assert response.headers[IGNORED] == "prediction, prompt"


@given(st.lists(st.text(max_size=300), max_size=20), st.lists(st.text(max_size=300), max_size=20))
def test_headers_are_short_printable_lines(fields: list[str], warnings: list[str]) -> None:
    notices = Notices()
    notices.ignore(*fields)
    notices.warn(*warnings)
    for _, value in notices.headers():
        assert len(value) <= 1000
        assert value.isascii()
        assert value.decode().isprintable()


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("field", "value", "answers"),
    [
        ("guided_json", SCHEMA, ('{"a": true}', '{"a": false}')),
        ("guided_json", json.dumps(SCHEMA), ('{"a": true}', '{"a": false}')),
        ("structured_outputs", {"json": SCHEMA}, ('{"a": true}', '{"a": false}')),
        ("guided_choice", ["Yes\n", 'a "no"'], ("Yes\n", 'a "no"')),
        ("guided_choice", ['\x01\x7f\t\x85\\u0001\u2028/"'], ('\x01\x7f\t\x85\\u0001\u2028/"',)),
        ("structured_outputs", {"choice": ["Yes", "No"]}, ("Yes", "No")),
        ("guided_grammar", 'root ::= "x" | "y"', ("x", "y")),
        ("structured_outputs", {"grammar": 'root ::= "x" | "y"'}, ("x", "y")),
    ],
    ids=repr,
)
def test_forms_by_the_names_of_vllm_are_followed(
    server: RunningServer, field: str, value: Any, answers: tuple[str, ...]
) -> None:
    response = post(server, "/v1/chat/completions", **{field: value, "max_tokens": 30})
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    if "json" in field or (isinstance(value, dict) and "json" in value):
        text = json.dumps(json.loads(text))
    assert text in answers
    assert IGNORED not in response.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a+"},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"structural_tag": {"type": "x"}}},
        {"guided_json": "no JSON"},
        {"guided_json": SCHEMA, "guided_choice": ["a"]},
        {"guided_json": SCHEMA, "structured_outputs": {"choice": ["a"]}},
        {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
        {"guided_choice": []},
        {"guided_json": ""},
        {"guided_json": {}, "guided_choice": ["a"]},
        {"guided_json": SCHEMA, "json_schema": SCHEMA},
        {"guided_json": {}, "json_schema": {}},
        {"guided_json": {}, "response_format": {"type": "json_object"}},
        {"guided_choice": ["a"], "grammar": 'root ::= "b"'},
    ],
    ids=repr,
)
def test_forms_that_cannot_be_followed_are_refused(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    assert post(server, "/v1/chat/completions", **fields).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_repetition_penalty_by_either_name_gives_the_same(
    server: RunningServer, path: str
) -> None:
    key = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    question = {"messages": MESSAGES, "input": "Hi", "prompt": "Hi", "temperature": 0, key: 12}
    names = {"/v1/chat/completions": "messages", "/v1/responses": "input"}
    prompt = names.get(path, "prompt")
    body = {name: question[name] for name in (prompt, "temperature", key)}
    with server.client() as client:
        texts = [
            text_of(client.post(path, json={**body, **fields}).json())
            for fields in (
                {},
                {"repetition_penalty": 30.0},
                {"repeat_penalty": 30.0, "repeat_last_n": -1},
            )
        ]
    assert texts[1] == texts[2] != texts[0]


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice.get("text") or choice["message"]["content"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_n_predict_limits_the_tokens(server: RunningServer, path: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "max_tokens"}
    with server.client() as client:
        response = client.post(path, json={**body, "n_predict": 3, "ignore_eos": True})
        both = client.post(path, json={**body, "n_predict": 3, "max_tokens": 2, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 3
    assert both.json()["usage"]["completion_tokens"] == 2
    assert IGNORED not in response.headers


def test_names_of_speakers_are_named_as_ignored(server: RunningServer) -> None:
    messages = [{**MESSAGES[0], "name": "alice"}, {**MESSAGES[0], "name": "bob"}]
    response = post(server, "/v1/chat/completions", messages=messages)
    assert response.headers[IGNORED] == "messages.name"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "name": "f", "content": "1"}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result]
    assert IGNORED not in post(server, "/v1/chat/completions", messages=history).headers


@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
def test_an_empty_schema_asks_for_any_json(server: RunningServer, field: str) -> None:
    value = {"json": {}} if field == "structured_outputs" else {}
    fields, greedy = {field: value}, {"max_tokens": 40, "temperature": 0}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}
    texts = [
        text_of(post(server, "/v1/chat/completions", **body, **greedy).json())
        for body in (fields, schema, {})
    ]
    assert texts[0] == texts[1] != texts[2]
