"""Fields of Anthropic's messages that are refused, or ignored and named."""

from typing import Any

import httpx
import pytest
from server.conftest import RunningServer

QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"max_tokens": -2},
        {"max_tokens": None},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"text": 5}]}]},
        {"thinking": {"type": 5}},
        {"output_config": {"format": {"type": "yaml"}}},
        {"temperature": 9},
        {"tools": [{"name": "no good name"}]},
        {"tool_choice": {"type": "tool", "name": "a"}},
        {"system": {"a": 1}},
    ],
    ids=repr,
)
def test_malformed_requests_are_refused_in_anthropics_form(
    server: RunningServer, body: dict[str, Any]
) -> None:
    params = {"model": "a", "messages": QUESTION, "max_tokens": 5, **body}
    response = httpx.post(f"{server.url}/v1/messages", json=params)
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_ignored_is_named(server: RunningServer, streamed: bool) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {
        "model": "a",
        "messages": QUESTION,
        "max_tokens": 2,
        "stream": streamed,
        "tools": [search],
        "metadata": {"user_id": "a"},
        "context_management": {"edits": []},
        "fallbacks": [{"model": "b"}],
    }
    blocks = [{"type": "of_next_year"}, {"type": "text", "text": "Hi"}]
    added = {"type": "tool_definition", "definition": {**search, "type": "web_fetch_20250910"}}
    unknown = {"type": "tool_reference", "name": "gone"}
    changes = [{"type": "tool_addition", "tool": tool} for tool in (added, unknown)]
    body["messages"] = [
        {"role": "user", "content": blocks},
        {"role": "system", "content": changes, "output_config": {"effort": "low"}},
    ]
    response = httpx.post(f"{server.url}/v1/messages?beta=true", json=body)
    assert response.status_code == 200, response.text
    ignored = response.headers["x-kvkeep-ignored"]
    assert "fallbacks" in ignored
    assert "context_management" not in ignored
    assert "web_search_20250305" in ignored
    assert "web_fetch_20250910" in ignored
    assert "tool_addition.gone" in ignored
    assert "messages.content.of_next_year" in ignored
    assert "messages.output_config" in ignored
    assert "metadata" not in ignored


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"thread": {"type": "create"}},
        {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
        {"mcp_servers": [{"type": "url", "name": "a", "url": "http://127.0.0.1:1"}]},
        {"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}},
    ],
    ids=repr,
)
def test_what_would_make_another_answer_is_refused(
    server: RunningServer, fields: dict[str, Any], streamed: bool
) -> None:
    body = {"model": "a", "messages": QUESTION, "max_tokens": 2, "stream": streamed, **fields}
    response = httpx.post(f"{server.url}/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    (name,) = fields
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{name} is not supported: ")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error.get("details") == (details if name == "thread" else None)
    nulls = httpx.post(f"{server.url}/v1/messages", json={**body, name: None})
    assert nulls.status_code == 200


def test_a_count_refuses_what_would_make_another_prompt(server: RunningServer) -> None:
    url, body = f"{server.url}/v1/messages/count_tokens", {"model": "a", "messages": QUESTION}
    count = httpx.post(url, json=body).json()
    more = {"compaction": {"type": "summarize"}, "max_tokens": 5, "speed": "fast"}
    response = httpx.post(url, json={**body, **more})
    assert response.json() == count
    assert "x-kvkeep-ignored" not in response.headers
    for name in ("thread", "mcp_servers"):
        refused = httpx.post(url, json={**body, name: {"type": "create"}})
        assert refused.status_code == 400
        assert name in refused.json()["error"]["message"]
