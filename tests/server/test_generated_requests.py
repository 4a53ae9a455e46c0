"""Requests generated from the OpenAPI document: none fails, hangs, or takes long.

    KVKEEP_REQUESTS=500 python -m pytest -s tests/server/test_generated_requests.py

KVKEEP_REQUESTS is the number of requests for each operation; by default there are some. Fields are
missing, of a wrong type, extreme, or as the document says, and some are not in the document.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer, running_server
from server.test_limits import body_schema, operations

from kvkeep import load_model
from kvkeep.engine import Limits

REQUESTS = int(os.environ.get("KVKEEP_REQUESTS", "0"))
DEFAULT_REQUESTS = 4
MAX_CPU_SECONDS = 5.0  # of server and client together, for one request
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "x")
ENDLESS = re.compile("/events$")
NAMES = st.sampled_from(["held", "other", "x" * 101, "..", "a/b", "é", "a\n", "slot-0", ".x"])

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=True)
    | st.text(max_size=6)
    | st.sampled_from(["", "\ud800", "<|im_end|>", "\0", "auto", "none", "required", 10**400, -0.0])
)
json_values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
wrong_values = json_values | st.sampled_from(
    [[[[]]] * 50, {"": {}}, "x" * 2000, [0] * 3000, -1, 2**31, 2**63, 1e308, -1e308]
)


def parts() -> st.SearchStrategy[Any]:
    kinds = ["text", "input_text", "image_url", "tool_use", "tool_result", "thinking", "x"]
    fields = ("text", "image_url", "id", "name", "input", "content", "tool_use_id", "source")
    return st.fixed_dictionaries(
        {"type": st.sampled_from(kinds)}, optional=dict.fromkeys(fields, json_values)
    )


def data_objects() -> st.SearchStrategy[Any]:
    """Objects of any form: messages, input items, tools, schemas, and none of these."""
    content = st.text(max_size=8) | st.lists(parts(), max_size=2) | json_values
    function = st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": json_values})
    call = st.fixed_dictionaries({"function": function}, optional={"id": json_values})
    call_fields = ("tool_call_id", "name", "reasoning_content", "function_call")
    calls = {"tool_calls": st.lists(call, max_size=2) | json_values}
    messages = st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": content},
        optional={**calls, **dict.fromkeys(call_fields, json_values)},
    )
    kinds = ["function", "message", "function_call", "function_call_output", "reasoning", "object"]
    kinds += ["json_schema", "custom", "mcp", "web_search", "ephemeral", "auto", "any", "tool"]
    fields = ("name", "parameters", "input_schema", "function", "call_id", "arguments", "output")
    fields += ("properties", "items", "required", "schema", "allowed_tools", "content", "id")
    others = st.fixed_dictionaries(
        {"type": st.sampled_from(kinds)}, optional=dict.fromkeys(fields, json_values)
    )
    return messages | others | st.dictionaries(st.text(max_size=4), json_values, max_size=3)


def values(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that a schema allows, the extreme ones among them."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return bodies(document["components"]["schemas"][name], document)
    if "anyOf" in schema:
        return st.one_of([values(member, document) for member in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if "prefixItems" in schema:
        return st.tuples(*(values(member, document) for member in schema["prefixItems"]))
    match schema.get("type"):
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            return st.text(
                st.characters(codec="utf-8"), max_size=min(schema.get("maxLength", 20), 20)
            )
        case "integer" | "number":
            lowest = schema.get("minimum", schema.get("exclusiveMinimum", -1))
            highest = schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
            extremes = [lowest, highest, 0, 1, 2, (lowest + highest) // 2]
            return st.sampled_from(extremes) | st.integers(1, 9)
        case "array":
            return st.lists(values(schema["items"], document), max_size=3)
        case "boolean":
            return st.booleans()
        case "object" if "properties" in schema:
            return bodies(schema, document)
        case "object":
            return data_objects()
    return json_values


def bodies(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return objects with the fields of a schema: some missing, some wrong, and others."""
    properties = schema.get("properties", {})
    required = {name: properties[name] for name in schema.get("required", ())}
    optional = {name: member for name, member in properties.items() if name not in required}

    @st.composite
    def body(draw: st.DrawFn) -> dict[str, Any]:
        result = {name: draw(values(member, document)) for name, member in required.items()}
        names = st.lists(st.sampled_from(sorted(optional)), max_size=4) if optional else st.just([])
        for name in draw(names):
            result[name] = draw(values(optional[name], document))
        if properties and draw(st.integers(0, 2)) == 0:
            result[draw(st.sampled_from(sorted(properties)))] = draw(wrong_values)
        if draw(st.integers(0, 5)) == 0:
            result[draw(st.text(max_size=5))] = draw(json_values)
        if required and draw(st.integers(0, 9)) == 0:
            del result[draw(st.sampled_from(sorted(required)))]
        return result

    return body()


@pytest.fixture(scope="module")
def tiny_server(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    model = load_model(tiny_folder)
    folder = tmp_path_factory.mktemp("generated")
    limits = Limits(memory=200_000_000)
    sessions = {"max_kv_size": 128, "policy": "full"}
    with running_server(model, folder, limits=limits, settings=sessions) as running:
        yield running


def test_no_generated_request_fails_or_hangs(tiny_server: RunningServer) -> None:
    statuses = Counter[int]()
    with tiny_server.client() as client:
        document = client.get("/openapi.json").json()
        for method, path, operation in operations(document):
            if not ENDLESS.search(path):
                try_operation(client, method, path, operation, document, statuses)
        assert client.get("/health").status_code == 200
    print(dict(sorted(statuses.items())))
    assert statuses[200] > sum(statuses.values()) / 20
    assert statuses[400]


def try_operation(
    client: httpx.Client,
    method: str,
    path: str,
    operation: dict[str, Any],
    document: dict[str, Any],
    statuses: Counter[int],
) -> None:
    """Send generated requests of one operation; count the statuses of the answers."""
    schema = body_schema(document, operation)
    body_values = st.none() if schema is None else bodies(schema, document) | wrong_values
    queries = [item for item in operation.get("parameters", ()) if item["in"] == "query"]
    query_values = st.fixed_dictionaries(
        {}, optional={item["name"]: values(item["schema"], document) | leaves for item in queries}
    )

    @settings(
        max_examples=REQUESTS or DEFAULT_REQUESTS,
        derandomize=not REQUESTS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(NAMES, body_values, query_values)
    def send(name: str, body: Any, query: dict[str, Any]) -> None:
        client.post("/v1/sessions", json={"name": "held", "max_kv_size": 64})
        url = re.sub(r"\{\w+\}", quote(name, safe=""), path)
        content = b"" if schema is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        texts = {key: str(value).encode("utf-8", "ignore").decode() for key, value in query.items()}
        start = time.process_time()
        response = client.request(method, url, content=content, headers=headers, params=texts)
        seconds = time.process_time() - start
        assert response.status_code < 500, (method, url, texts, content, response.text)
        assert seconds < MAX_CPU_SECONDS, (method, url, texts, content, seconds)
        statuses[response.status_code] += 1

    send()
