"""Thousands of malformed requests: each is refused with an error in the API's form."""

import json
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/compact": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}},
    "/api/show": {"model": "smollm2"},
    "/completion": {"prompt": "x", "n_predict": 1},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/prefix/explain": {"text": "x"},
    "/v1/sessions": {"max_kv_size": 64},
    "/v1/sessions/held/feed": {"text": "x"},
    "/v1/sessions/held/generate": {"max_tokens": 1},
    "/v1/sessions/held/turns": {"content": "x", "max_tokens": 1},
    "/v1/sessions/held/edit": {"op": "delete", "start": 1, "end": 2},
    "/v1/sessions/held/fork": {},
    "/v1/sessions/held/revert": {"to": "x"},
    "/v1/sessions/held/pin": {"start": 1, "end": 2},
    "/v1/sessions/held/rewind": {"count": 1},
    "/v1/sessions/held/spans": {"name": "x", "start": 1, "end": 2},
    "/v1/sessions/held/compress": {"ratio": 2},
    "/v1/sessions/held/align": {"tokens": [5, 6, 7, 8]},
    "/v1/sessions/held/compact": {"target": 0.5},
    "/v1/sessions/held/snapshot": {"name": "x"},
}
# Fields that accept any text: it is not used, or may be of any kind.
ANY_TEXT = {"model", "function_call", "reasoning_effort", "think", "keep_alive", "stop"}
WRONG = ({"x": []}, [[{}]], "\ud800 is half a character", -(10**30), 10**30, 1e308)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        created.post("/v1/sessions", json={"name": "held", "max_kv_size": 64})
        created.post("/v1/sessions/held/feed", json={"tokens": [5, 6, 7, 8]})
        yield created


@pytest.fixture(scope="module")
def fields(client: httpx.Client) -> dict[str, list[tuple[str, Any]]]:
    """Return each route's fields with values they cannot have, by the OpenAPI document."""
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    result: dict[str, list[tuple[str, Any]]] = {}
    for path in VALID:
        route = document["paths"][path.replace("/held/", "/{name}/")]["post"]
        body = route["requestBody"]["content"]["application/json"]["schema"]
        body = next(iter(body.get("anyOf", [body])))
        properties = schemas[body["$ref"].rpartition("/")[2]].get("properties", {})
        result[path] = [
            (name, wrong)
            for name, item in properties.items()
            for wrong in WRONG
            if not (isinstance(wrong, str) and name in ANY_TEXT)
            if not allows(item, wrong, schemas)
        ]
    return result


def allows(schema: dict[str, Any], value: Any, schemas: dict[str, Any]) -> bool:
    """Whether a schema allows a value; True in doubt."""
    if "$ref" in schema:
        return isinstance(value, dict)
    if "anyOf" in schema:
        return any(allows(item, value, schemas) for item in schema["anyOf"])
    python_types = {"string": str, "boolean": bool, "array": list, "object": dict}
    python_types["null"] = type(None)
    json_type = schema.get("type")
    if json_type in ("integer", "number"):
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        huge = isinstance(value, (int, float)) and any(item in schema for item in bounds)
        return isinstance(value, (int, float)) and not huge
    if json_type == "string" and isinstance(value, str):
        return False  # a lone surrogate is in no text
    return json_type not in python_types or isinstance(value, python_types[json_type])


def require_refused(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, (response.request.content[:200], response.status_code)
    error = response.json()["error"]
    if response.request.url.path.startswith("/api/"):  # Ollama's errors are texts
        assert error
        return
    assert error["message"]
    assert error["type"]


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_bodies_that_are_not_json_are_refused(client: httpx.Client, times: int) -> None:
    """Truncated, with a byte changed, nested too deep, or of no encoding."""
    draw = random.Random(1)
    count = 0
    for path, valid in VALID.items():
        valid_body = json.dumps(valid).encode()
        bodies = [valid_body[: draw.randrange(len(valid_body))] for _ in range(10 * times)]
        bodies += [bytes(draw.randrange(256) for _ in range(30)) for _ in range(3 * times)]
        bodies += [b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", b"nul", b"{]", b"NaN", b'"x"']
        for body in bodies:
            if is_object(body):
                continue
            headers = {"Content-Type": "application/json"}
            require_refused(client.post(path, content=body, headers=headers))
            count += 1
    assert count > 250 * times


def is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return not body  # an empty body may stand for one without fields


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_values_of_wrong_types_are_refused(
    client: httpx.Client, fields: dict[str, list[tuple[str, Any]]], every: int
) -> None:
    """In every field of every route, beside valid fields; every so manieth value."""
    count = 0
    for path, wrongs in fields.items():
        for start, streamed in enumerate(({}, {"stream": True})):
            for name, wrong in wrongs[start * (every // 2) :: every]:
                body = json.dumps({**VALID[path], **streamed, name: wrong})
                headers = {"Content-Type": "application/json"}
                require_refused(client.post(path, content=body, headers=headers))
                count += 1
    assert count > 500 // every


HEADERS = {
    "If-Match": ['"x"', '""', "1e3", '"-1"', '"' + "9" * 30 + '"', "²", "W/", '"1", "2"'],
    "Idempotency-Key": ["", "x" * 201, "x" * 5000],
    "Host": ["", "evil", "127.0.0.1.evil", "[::1", "127.0.0.1@evil", "a:b:c"],
    "Origin": ["x", "null", "http://evil", "http://127.0.0.1", "://", "http://"],
}


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999999999999999999", "+5"])
def test_malformed_content_lengths_are_refused(server: RunningServer, length: str) -> None:
    """The connection is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert re.match(rb"HTTP/1.1 4\d\d ", connection.recv(4096))


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_headers_are_refused(server: RunningServer, name: str) -> None:
    """On each route that reads the header."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "headed", "max_kv_size": 64})
        body = {"tokens": [5]}
        for value in HEADERS[name]:
            headers = [(name.encode(), value.encode())]
            response = client.post("/v1/sessions/headed/feed", json=body, headers=headers)  # type: ignore[arg-type]
            assert 400 <= response.status_code < 500, (name, value, response.status_code)
        assert client.get("/v1/sessions/headed").json()["tokens"] == 0
