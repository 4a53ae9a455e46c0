"""Thousands of malformed requests: each is refused, and told why in the API's own form."""

import json
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server.conftest import Running

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
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
    "/v1/sessions/held/pin": {"start": 1, "end": 2},
    "/v1/sessions/held/rewind": {"count": 1},
    "/v1/sessions/held/spans": {"name": "x", "start": 1, "end": 2},
    "/v1/sessions/held/compress": {"ratio": 2},
    "/v1/sessions/held/snapshot": {"name": "x"},
}
WRONG = ({"x": []}, [[{}]], "\ud800 is half a character", -(10**30), 10**30, 1e308)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        made.post("/v1/sessions", json={"name": "held", "max_kv_size": 64})
        made.post("/v1/sessions/held/feed", json={"tokens": [5, 6, 7, 8]})
        yield made


@pytest.fixture(scope="module")
def fields(client: httpx.Client) -> dict[str, list[tuple[str, Any]]]:
    """Of each route: fields, and a value that each cannot have, by the server's own document."""
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    found: dict[str, list[tuple[str, Any]]] = {}
    for path in VALID:
        route = document["paths"][path.replace("/held/", "/{name}/")]["post"]
        body = route["requestBody"]["content"]["application/json"]["schema"]
        body = next(iter(body.get("anyOf", [body])))
        properties = schemas[body["$ref"].rpartition("/")[2]].get("properties", {})
        found[path] = [
            (name, wrong)
            for name, each in properties.items()
            for wrong in WRONG
            if name != "model" and not allows(each, wrong, schemas)  # there is one, by any name
        ]
    return found


def allows(schema: dict[str, Any], value: Any, schemas: dict[str, Any]) -> bool:
    """Whether something of that kind may be a value; in doubt it may."""
    if "$ref" in schema:
        return isinstance(value, dict)
    if "anyOf" in schema:
        return any(allows(each, value, schemas) for each in schema["anyOf"])
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict}
    kind = schema.get("type")
    if kind in ("integer", "number"):
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        huge = isinstance(value, (int, float)) and any(each in schema for each in bounds)
        return isinstance(value, (int, float)) and not huge
    if kind == "string" and isinstance(value, str):
        return False  # half a character is in no text
    return kind not in kinds or isinstance(value, kinds[kind])


def refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, (answer.request.content[:200], answer.status_code)
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]


def test_bodies_that_are_no_json(client: httpx.Client) -> None:
    """Cut off, with a byte changed, too deep, or in no encoding."""
    draw = random.Random(1)
    count = 0
    for path, valid in VALID.items():
        whole = json.dumps(valid).encode()
        bodies = [whole[: draw.randrange(len(whole))] for _ in range(60)]
        bodies += [bytes(draw.randrange(256) for _ in range(30)) for _ in range(20)]
        bodies += [b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", b"nul", b"{]", b"NaN", b'"x"']
        for body in bodies:
            if is_object(body):
                continue
            headers = {"Content-Type": "application/json"}
            refused(client.post(path, content=body, headers=headers))
            count += 1
    assert count > 1500


def is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return not body  # no body at all may be one without fields


def test_values_of_the_wrong_kind(
    client: httpx.Client, fields: dict[str, list[tuple[str, Any]]]
) -> None:
    """In every field of every route, and among right ones."""
    count = 0
    for path, wrongs in fields.items():
        for streamed in ({}, {"stream": True}):
            for name, wrong in wrongs:
                body = json.dumps({**VALID[path], **streamed, name: wrong})
                headers = {"Content-Type": "application/json"}
                refused(client.post(path, content=body, headers=headers))
                count += 1
    assert count > 500


HEADERS = {
    "If-Match": ['"x"', '""', "1e3", '"-1"', '"' + "9" * 30 + '"', "²", "W/", '"1", "2"'],
    "Idempotency-Key": ["", "x" * 201, "x" * 5000],
    "Host": ["", "evil", "127.0.0.1.evil", "[::1", "127.0.0.1@evil", "a:b:c"],
    "Origin": ["x", "null", "http://evil", "http://127.0.0.1", "://", "http://"],
}


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999999999999999999", "+5"])
def test_lengths(server: Running, length: str) -> None:
    """That no client would send by mistake; the connection ends."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert re.match(rb"HTTP/1.1 4\d\d ", connection.recv(4096))


@pytest.mark.parametrize("name", HEADERS)
def test_headers(server: Running, name: str) -> None:
    """On each route that reads them."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "headed", "max_kv_size": 64})
        body = {"tokens": [5]}
        for value in HEADERS[name]:
            headers = [(name.encode(), value.encode())]
            answer = client.post("/v1/sessions/headed/feed", json=body, headers=headers)  # type: ignore[arg-type]
            assert 400 <= answer.status_code < 500, (name, value, answer.status_code)
        assert client.get("/v1/sessions/headed").json()["tokens"] == 0
