"""Requests as clients send them: nulls, limits of -1, unknown keywords of schemas."""

import json
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer

from kvkeep.server.anthropic.request import CountTokensRequest

MESSAGES = [{"role": "user", "content": "Name a city."}]
WARNING = "X-Kvkeep-Warning"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/completion": {"prompt": "Hi", "n_predict": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}
OLLAMA_BODY = {"messages": MESSAGES, "stream": False}


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={**BODIES.get(path, OLLAMA_BODY), **fields})


@pytest.mark.parametrize("path", BODIES)
def test_null_means_that_a_field_is_missing(server: RunningServer, path: str) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    body_schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body_schema["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    optional = set(schema["properties"]) - set(schema["required"]) - set(BODIES[path])
    assert len(optional) > 5
    for field in optional:
        assert {"type": "null"} in schema["properties"][field]["anyOf"]
    fields = {**BODIES[path], **dict.fromkeys(optional), "temperature": 0}
    with server.client() as client:
        response = client.post(path, json=fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", BODIES)
def test_a_top_p_of_0_takes_the_likeliest_tokens(server: RunningServer, path: str) -> None:
    def text(**fields: Any) -> Any:
        answer = post(server, path, **fields).json()
        return next(answer[key] for key in ("choices", "content", "output") if key in answer)

    sampled, greedy = text(top_p=0, temperature=2.0), text(top_k=1, temperature=2.0)
    if path == "/v1/responses":  # ids of items differ
        sampled, greedy = sampled[0]["content"], greedy[0]["content"]
    assert sampled == greedy


@pytest.mark.parametrize("stop", [None, [], "", [""]])
def test_no_stop_strings_in_any_form(server: RunningServer, stop: Any) -> None:
    answer = post(server, "/v1/chat/completions", stop=stop).json()
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"max_tokens": -1}),
        ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": -1}),
        ("/v1/completions", {"max_tokens": -1}),
        ("/v1/responses", {"max_output_tokens": -1}),
        ("/v1/responses", {"max_output_tokens": -1, "truncation": "disabled"}),
        ("/v1/messages", {"max_tokens": -1}),
        ("/completion", {"n_predict": -1}),
        ("/api/chat", {"options": {"num_predict": -1, "stop": [" "]}}),
        ("/api/chat", {"options": {"num_predict": -2, "stop": [" "]}}),
        ("/api/chat", {"options": {"num_predict": 0, "stop": [" "]}}),
    ],
)
def test_limits_that_mean_no_limit(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    stop = {"stop": [" "], "stop_sequences": [" "]}  # the first end comes soon
    response = post(server, path, **stop, **fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    reasons = (answer.get(name) for name in ("status", "stop_reason", "stop_type", "done_reason"))
    (reason,) = filter(None, [*reasons, answer.get("choices", [{}])[0].get("finish_reason")])
    assert reason in ("completed", "stop_sequence", "end_turn", "word", "eos", "stop")
    assert answer.get("max_output_tokens") is None


@pytest.mark.parametrize(
    ("path", "name", "limit"),
    [
        ("/v1/responses", "max_output_tokens", 0),  # of messages: "prepare the prompt"
        ("/v1/responses", "max_output_tokens", -2),
        ("/v1/messages", "max_tokens", -2),
    ],
)
def test_limits_that_are_no_number_of_tokens_are_refused(
    server: RunningServer, path: str, name: str, limit: int
) -> None:
    response = post(server, path, **{name: limit})
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "ignored"),
    [("enabled", None), ("adaptive", None), ("between_tools", None), ("deep", "thinking.type")],
)
def test_kinds_of_thinking_are_accepted_or_named_in_a_header(
    server: RunningServer, kind: str, ignored: str | None
) -> None:
    response = post(server, "/v1/messages", thinking={"type": kind})
    assert response.status_code == 200, response.text
    assert response.headers.get("X-Kvkeep-Ignored") == ignored


def test_thinking_between_tools_is_thinking_turned_off() -> None:
    """Reasoning is off then, as Anthropic's library says."""
    body = {"messages": MESSAGES, "thinking": {"type": "between_tools"}}
    request = CountTokensRequest.model_validate(body)
    assert request.render_options().enable_thinking is False
    assert request.reasoning_budget == 0


def schema_answer(server: RunningServer, schema: dict[str, Any]) -> httpx.Response:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return post(server, "/v1/chat/completions", response_format=response_format, max_tokens=40)


@pytest.mark.parametrize(
    ("property_schema", "named"),
    [
        ({"type": "string", "maxLength": 5, "not": {"const": "a"}}, "not"),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2, "uniqueItems": True}, "unique"),
        ({"type": "string", "maxLength": 5, "format": "color"}, "color"),
        ({"type": "string", "maxLength": 5, "pattern": "^(?=a)"}, "(?=a)"),
    ],
)
def test_keywords_that_cannot_be_followed_are_named_in_a_header(
    server: RunningServer, property_schema: dict[str, Any], named: str
) -> None:
    schema = {"type": "object", "properties": {"a": property_schema}, "required": ["a"]}
    response = schema_answer(server, schema)
    assert response.status_code == 200, response.text
    assert named in response.headers[WARNING]
    assert response.json()["choices"][0]["message"]["content"].startswith('{"a":')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"$ref": "#/$defs/missing"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_an_impossible_schema_is_refused_with_a_short_reason(
    server: RunningServer, schema: dict[str, Any]
) -> None:
    response = schema_answer(server, schema)
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert len(message.splitlines()) == 1
    assert len(message) < 300


def test_an_invalid_grammar_is_refused_with_a_short_reason(server: RunningServer) -> None:
    for grammar in ('root ::= "a" (', "root ::= missing", "x" * 3000):
        response = post(server, "/v1/chat/completions", grammar=grammar)
        message = response.json()["error"]["message"]
        assert response.status_code == 400
        assert (len(message.splitlines()), len(message) < 300) == (1, True)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '{"a":' * 300 + "1" + "}" * 300])
@pytest.mark.parametrize("path", BODIES)
def test_what_no_json_can_hold_is_refused(server: RunningServer, path: str, value: str) -> None:
    body = json.dumps({**BODIES[path], "metadata": "VALUE"}).replace('"VALUE"', value)
    with server.client() as client:
        response = client.post(path, content=body)
    assert response.status_code == 400
    assert "finite" in response.text or "nested too deeply" in response.text


def test_arguments_that_are_nested_too_deeply_are_text(server: RunningServer) -> None:
    arguments = '{"a":' * 900 + "1" + "}" * 900
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]
    response = post(server, "/v1/chat/completions", messages=messages)
    assert response.status_code == 400 or response.json()["choices"]
    assert "internal server error" not in response.text
