"""Schemas with which the library of constraints would end the process are refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from server.conftest import RunningServer

from kvkeep.errors import InvalidArgument
from kvkeep.server.schema_safety import require_safe_schema

# Compiles a schema in a thread, as the server does.
COMPILE = """
import sys, threading
from llguidance import LLMatcher
grammar = LLMatcher.grammar_from_json_schema(sys.stdin.read(), defaults={"lenient": True})
thread = threading.Thread(target=lambda: LLMatcher.validate_grammar(grammar))
thread.start()
thread.join()
"""
LINKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "reference": lambda name: {"$ref": name},
    "allOf": lambda name: {"allOf": [{"$ref": name}]},
    "property": lambda name: {"properties": {"a": {"$ref": name}}},
    "items": lambda name: {"items": {"anyOf": [{"allOf": [{"items": {"$ref": name}}]}, {}]}},
}
LOWEST = [-(2**63), -(2**63) + 7, -1e300]


def chain(link: str, length: int) -> dict[str, Any]:
    definitions = {f"d{n}": LINKS[link](f"#/$defs/d{n + 1}") for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}}


def longest(link: str) -> int:
    """Return the length of the longest chain that is allowed."""
    low, high = 1, 4_000
    while low < high:
        middle = (low + high + 1) // 2
        try:
            require_safe_schema(chain(link, middle))
            low = middle
        except InvalidArgument:
            high = middle - 1
    return low


@pytest.mark.parametrize("link", LINKS)
def test_the_longest_chains_of_references_that_are_allowed_end_no_process(link: str) -> None:
    length = longest(link)
    assert length >= 100
    schema = json.dumps(chain(link, length))
    command = [sys.executable, "-c", COMPILE]
    assert subprocess.run(command, input=schema, text=True, check=False).returncode == 0


def schemas() -> dict[str, Any]:
    chains = {link: chain(link, 3_000) for link in LINKS}
    numbers = {f"const {number}": {"const": number} for number in LOWEST}
    nested = {"enum": [1, {"x": [-(2**63)]}]}
    bounds = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
    return {**chains, **numbers, "nested": nested, "bounds": bounds}


@pytest.mark.parametrize("name", schemas())
def test_schemas_that_would_end_the_process_are_refused(server: RunningServer, name: str) -> None:
    """Formats of answers and parameters of tools are refused alike."""
    schema = schemas()[name]
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    with server.client() as client:
        body = {"prompt": "x", "n_predict": 1, "json_schema": schema}
        response = client.post("/completion", json=body)
        assert response.status_code == 400
        assert "a schema" in response.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=chat).status_code in (200, 400)
        assert client.get("/health").status_code == 200


def test_a_schema_of_many_definitions_is_allowed() -> None:
    """Each of its definitions refers to itself and to a few others."""
    require_safe_schema(
        {
            "anyOf": [{"$ref": f"#/$defs/d{n}"} for n in range(150)],
            "$defs": {
                f"d{n}": {"properties": {"next": {"$ref": f"#/$defs/d{(n * 7) % 150}"}}}
                for n in range(150)
            },
        }
    )
