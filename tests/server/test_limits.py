"""Limits of requests: each field has one, and a value beyond it is refused by name and number."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer

from kvkeep.fleet.session_target import parse_json_object
from kvkeep.server.body_route import MAX_BYTES_AT_ONCE
from kvkeep.server.errors import ApiError
from kvkeep.server.limits import (
    MAX_ENTRIES,
    MAX_TOOLS,
    MAX_VALUES,
    count_values,
    require_few_values,
)

MAX_SENT = 5_000  # characters or entries that a test sends to exceed a limit
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    with server.client() as client:
        return dict(client.get("/openapi.json").json())


def body_schema(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of an operation's body, without the alternative null; None without one."""
    if "requestBody" not in operation:
        return None
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    reference = next(iter(schema.get("anyOf", [schema])))["$ref"]
    return dict(document["components"]["schemas"][reference.rpartition("/")[2]])


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def unbounded(schema: dict[str, Any], place: str, document: dict[str, Any]) -> Iterator[str]:
    """Yield the places in a schema at which a value may have any size."""
    if "$ref" in schema:
        target = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        yield from unbounded(target, place, document)
    for member in (*schema.get("anyOf", ()), *schema.get("prefixItems", ())):
        yield from unbounded(member, place, document)
    if "enum" in schema or "const" in schema:
        return
    for name, member in schema.get("properties", {}).items():
        yield from unbounded(member, f"{place}.{name}", document)
    match schema.get("type"):
        case "string" if "maxLength" not in schema and "pattern" not in schema:
            yield f"{place} is text of any length"
        case "array" if "maxItems" not in schema:
            yield f"{place} is a list of any length"
        case "object" if "properties" not in schema and "maxProperties" not in schema:
            yield f"{place} has any number of entries"
        case "integer" | "number" if not (
            {"minimum", "exclusiveMinimum"} & schema.keys()
            and {"maximum", "exclusiveMaximum"} & schema.keys()
        ):
            yield f"{place} is any number"
    if isinstance(items := schema.get("items"), dict):
        yield from unbounded(items, f"{place}[]", document)


def test_every_field_of_every_operation_has_a_limit(document: dict[str, Any]) -> None:
    places = set[str]()
    for method, path, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            places.update(
                unbounded(parameter["schema"], f"{method} {path} {parameter['name']}", document)
            )
        schema = body_schema(document, operation)
        if schema is not None:
            places.update(unbounded(schema, f"{method} {path}", document))
    assert not places


def beyond(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield values just beyond the limits of a field, each with its limit."""
    if "$ref" in schema or "const" in schema or "enum" in schema:
        return
    for member in schema.get("anyOf", ()):
        yield from beyond(member, document)
    if (length := schema.get("maxLength", MAX_SENT)) < MAX_SENT:
        yield "x" * (length + 1), length
    if (length := schema.get("maxItems", MAX_SENT)) < MAX_SENT:
        yield [smallest(schema["items"])] * (length + 1), length
    if (length := schema.get("maxProperties", MAX_SENT)) < MAX_SENT:
        yield {str(number): 0 for number in range(length + 1)}, length
    if "maximum" in schema:
        yield schema["maximum"] + 1, int(schema["maximum"])


def smallest(schema: dict[str, Any]) -> Any:
    """Return a small value of a schema."""
    for member in schema.get("anyOf", ()):
        return smallest(member)
    if "prefixItems" in schema:
        return [smallest(member) for member in schema["prefixItems"]]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        return [smallest(schema["items"])] * schema.get("minItems", 0)
    values = {"string": "x", "integer": 1, "number": 1, "boolean": False}
    return values.get(schema.get("type", ""), {"type": "x", "text": "x"})


def require_named(response: httpx.Response, field: str, limit: int) -> None:
    """Check an error: it is in the API's form, and names the field and the limit."""
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    path = response.request.url.path
    message = error if path.startswith("/api/") else error["message"]
    assert message.startswith(field), message[:300]
    assert str(limit) in message.replace(",", ""), message[:300]
    if not path.startswith(("/api/", "/v1/messages")):
        assert error["param"] is None or error["param"].partition(".")[0] == field, error


def test_a_value_beyond_the_limit_of_its_field_is_refused_by_name(
    server: RunningServer, document: dict[str, Any]
) -> None:
    """Once for fields that several routes of an API share."""
    tried, count = set[str](), 0
    with server.client() as client:
        for method, path, operation in operations(document):
            schema = body_schema(document, operation) or {}
            required = {
                name: smallest(schema["properties"][name]) for name in schema.get("required", ())
            }
            for field, field_schema in schema.get("properties", {}).items():
                shared = f"{path[:6]} {field} {field_schema}"
                if shared in tried:
                    continue
                tried.add(shared)
                for value, limit in beyond(field_schema, document):
                    url = path.replace("{name}", "x").replace("{slot}", "0")
                    body = {**required, field: value}
                    response = client.request(method, f"{url}?action=save", json=body)
                    require_named(response, field, limit)
                    count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "messages.0", [{"content": [{}] * (MAX_ENTRIES + 1)}]),
        ("/v1/messages", "messages.0", [{"content": [{}] * (MAX_ENTRIES + 1)}]),
        ("/v1/responses", "input.0", [{"content": {"a": {"b": [0] * (MAX_ENTRIES + 1)}}}]),
        ("/api/chat", "messages.0", [{"images": ["x"] * (MAX_ENTRIES + 1)}]),
        ("/v1/sessions/x/align", "messages.0", [{"content": [{}] * (MAX_ENTRIES + 1)}]),
        ("/completion", "json_schema", {"enum": ["x"] * (MAX_ENTRIES + 1)}),
    ],
)
def test_lists_inside_messages_and_schemas_have_a_limit(
    server: RunningServer, path: str, field: str, value: Any
) -> None:
    fields = {"prompt": "x", "messages": USER, "input": "x", "max_tokens": 1}
    with server.client() as client:
        response = client.post(path, json={**fields, field.partition(".")[0]: value})
    assert response.status_code == 400
    assert field in response.text
    assert f"at most {MAX_ENTRIES:,} entries; found {MAX_ENTRIES + 1:,}" in response.text


@pytest.mark.parametrize(
    ("path", "field", "value", "limit"),
    [
        ("/v1/completions", "logit_bias", dict.fromkeys(map(str, range(100_001)), 1), 100_000),
        ("/completion", "logit_bias", [[1, 1]] * 100_001, 100_000),
        ("/completion", "grammar", "x" * 200_001, 200_000),
        ("/v1/completions", "logit_bias", {"9" * 5000: 1}, 1_000),
        ("/v1/completions", "stop", ["x" * 1_001], 1_000),
        ("/v1/chat/completions", "messages", [{}] * 20_001, 20_000),
        ("/v1/messages", "messages", [{}] * 20_001, 20_000),
        ("/v1/sessions/x/feed", "tokens", [1] * 1_000_001, 1_000_000),
    ],
    ids=[
        "biases",
        "pairs of biases",
        "grammar",
        "a token's digits",
        "stop",
        "messages",
        "Anthropic",
        "tokens",
    ],
)
def test_long_lists_and_texts_have_a_limit(
    server: RunningServer, path: str, field: str, value: Any, limit: int
) -> None:
    with server.client() as client:
        require_named(
            client.post(path, json={"prompt": "x", "max_tokens": 1, field: value}), field, limit
        )


def test_as_many_tools_as_agents_send_are_accepted(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with server.client() as client:
        body = {"messages": USER, "tools": [tool] * MAX_TOOLS}
        assert client.post("/apply-template", json=body).status_code == 200


@pytest.mark.parametrize(
    "value", [[], [1, [2]], {"a": {}}, {"a,[": "{:,", "b": [0, 1]}, ['"', "\\", '\\"', ",\\\\"]]
)
def test_values_of_json_are_counted_without_parsing(value: Any) -> None:
    """By the marks before values, which are the commas of lists and objects too, but not texts."""
    text = json.dumps(value)
    skeleton = json.dumps(emptied(value))
    assert count_values(text.encode()) == sum(map(skeleton.count, ",:[{"))


def emptied(value: Any) -> Any:
    """Return a value with its texts and names empty of marks."""
    if isinstance(value, dict):
        return {f"n{index}": emptied(item) for index, item in enumerate(value.values())}
    if isinstance(value, list):
        return list(map(emptied, value))
    return "" if isinstance(value, str) else value


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    body = b'{"prompt":[' + b"[]," * MAX_VALUES + b"[]]}"
    with server.client() as client:
        for content in (body, iter([body])):
            response = client.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert f"at most {MAX_VALUES:,} values; found {2 * MAX_VALUES + 4:,}" in response.text
        text = client.post("/tokenize", json={"content": "x" + "," * (MAX_VALUES + 1)})
        assert text.status_code == 200


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_json_in_another_encoding_than_utf_8_is_refused(
    server: RunningServer, encoding: str
) -> None:
    """Its values would not be counted. UTF-8 may have a byte order mark."""
    headers = {"Content-Type": "application/json"}
    with server.client() as client:
        for padding in ("", "x" * MAX_BYTES_AT_ONCE):
            text = json.dumps({"content": padding})
            response = client.post("/tokenize", content=text.encode(encoding), headers=headers)
            assert response.status_code == 400
            assert "the body must be JSON in UTF-8" in response.text
            marked = client.post("/tokenize", content=text.encode("utf-8-sig"), headers=headers)
            assert marked.status_code == 200
        values = "{" + f'"prompt": [{"[]," * (MAX_VALUES + 1)}[]]' + "}"
        response = client.post("/completion", content=values.encode(encoding), headers=headers)
        assert response.status_code in (400, 413)
    with pytest.raises(ApiError):
        parse_json_object('{"name": "a"}'.encode(encoding))


def test_texts_with_many_commas_are_no_values() -> None:
    require_few_values(b'{"a": "' + b"[,{:" * MAX_VALUES + b'"}')
    with pytest.raises(ApiError):
        require_few_values(b'{"a": ' + b'"\\\\",' * (MAX_VALUES + 1))


def chain_of_rules(length: int) -> str:
    rules = [f'r{number} ::= "a" r{number + 1}' for number in range(length - 2)]
    return "\n".join(["root ::= r0", *rules, f'r{length - 2} ::= "b"'])


def test_grammars_have_a_limit_of_rules(server: RunningServer) -> None:
    """Converting a chain of 10,000 rules would take minutes."""
    with server.client() as client:
        body = {"prompt": "x", "n_predict": 1, "grammar": chain_of_rules(1_001)}
        response = client.post("/completion", json=body)
        assert response.status_code == 400
        assert "at most 1,000 rules; found 1,001" in response.json()["error"]["message"]
        body["grammar"] = chain_of_rules(100)
        assert client.post("/completion", json=body).status_code == 200


def test_a_slow_compilation_holds_up_no_other_request(server: RunningServer) -> None:
    """Two of them wait in the threads that compile; all other work goes on."""
    release = threading.Event()
    waiting = [server.service.compiler.submit(release.wait, 60) for _ in range(2)]
    schema = {"prompt": "x", "max_tokens": 1, "n_predict": 1, "json_schema": {"type": "integer"}}
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        constrained = [pool.submit(client.post, "/completion", json=schema) for _ in range(8)]
        body = {"messages": USER, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x" * 20_000}).status_code == 400
        assert not any(future.done() for future in (*waiting, *constrained))
        release.set()
        assert all(future.result().status_code == 200 for future in constrained)
