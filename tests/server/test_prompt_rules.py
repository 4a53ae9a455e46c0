"""Prompt rules in the chat APIs: prompts that differ in a header are reused, and answers say so."""

from typing import Any

import pytest
from server.conftest import RunningServer

from kvkeep.chat.prompt_rules import select_rules

RULES_HEADER = "X-Kvkeep-Prompt-Rules"


def system_text(api: str, request_number: int) -> str:
    header = f"x-anthropic-billing-header: cc_version=2.1.{request_number}; cch={request_number};"
    return f"{header}\nThis is for clients of {api}. " + "Answer in one word. " * 60


def body(api: str, request_number: int) -> dict[str, Any]:
    """Return a request whose system text begins with a header of its own."""
    system = system_text(api, request_number)
    question = [{"role": "user", "content": f"Question {request_number}?"}]
    with_system = [{"role": "system", "content": system}, *question]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": with_system, "max_tokens": 1},
        "/v1/responses": {"input": question, "instructions": system, "max_output_tokens": 1},
        "/v1/messages": {"messages": question, "system": system, "max_tokens": 1},
        "/api/chat": {"messages": with_system, "options": {"num_predict": 1}, "stream": False},
    }
    return bodies[api]


def cached_tokens(api: str, answer: dict[str, Any]) -> int:
    match api:
        case "/v1/responses":
            return int(answer["usage"]["input_tokens_details"]["cached_tokens"])
        case "/v1/messages":
            return int(answer["usage"]["cache_read_input_tokens"])
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("api", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_prompt_with_another_billing_header_is_reused(server: RunningServer, api: str) -> None:
    with server.client() as client:
        client.post(api, json=body(api, 1)).raise_for_status()
        response = client.post(api, json=body(api, 2))
    assert response.headers[RULES_HEADER] == "billing-header"
    assert cached_tokens(api, response.json()) >= 256


def test_explain_and_ollamas_api_name_the_rules(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post("/api/chat", json=body("/api/chat", 1))
        messages = body("/api/chat", 2)["messages"]
        explained = client.post("/v1/prefix/explain", json={"messages": messages})
        plain = client.post("/v1/prefix/explain", json={"text": messages[0]["content"]})
    assert response.headers[RULES_HEADER] == "billing-header"
    assert explained.json()["prompt_rules"] == ["billing-header"]
    assert explained.json()["reused"] >= 256
    assert plain.json()["prompt_rules"] == []


def test_rules_that_are_off_change_nothing(server: RunningServer) -> None:
    before = server.service.prompt_rules
    server.service.prompt_rules = select_rules("none")
    try:
        with server.client() as client:
            response = client.post("/apply-template", json=body("/v1/chat/completions", 3))
    finally:
        server.service.prompt_rules = before
    assert "x-anthropic-billing-header" in response.json()["prompt"]
    assert RULES_HEADER not in response.headers


def test_tools_that_come_later_leave_the_prompt_before_them_as_it_was(
    server: RunningServer,
) -> None:
    names = [f"tool_{number}" for number in range(8)]
    texts = [f"{name}: looks at a thing, and says what it is." for name in names]
    functions = [{"name": n, "description": text} for n, text in zip(names, texts, strict=True)]
    tools = [{"type": "function", "function": function} for function in functions]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "For tools. " + "Answer in one word. " * 60},
        {"role": "user", "content": "Question?"},
    ]
    later: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ]
    cached = []
    for rules in ("default", "late-tools"):
        server.service.prompt_rules = select_rules(rules)
        messages[0]["content"] += rules
        with server.client() as client:
            for history, count in ((messages, 7), ([*messages, *later], 8)):
                fields = {"messages": history, "tools": tools[:count], "max_tokens": 1}
                answer = client.post("/v1/chat/completions", json=fields)
        cached.append(cached_tokens("", answer.json()))
        assert (answer.headers.get(RULES_HEADER) == "late-tools") is (rules == "late-tools")
    server.service.prompt_rules = select_rules("default")
    assert cached[0] < cached[1]
