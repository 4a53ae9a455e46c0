"""Prompts longer than the context: refused in clients' words, or forgotten in part."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server

from kvkeep.client import Client
from kvkeep.errors import ContextFull
from kvkeep.model import Model

CONTEXT = 96  # tokens
LONG = "One two three four. " * 30
SHORT = "Count to a hundred."
WARNING = "X-Kvkeep-Warning"


def chat(text: str, max_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def body(path: str, text: str, max_tokens: int = 4) -> dict[str, Any]:
    """Return a request's body. The answer never ends before `max_tokens`."""
    if path in ("/v1/chat/completions", "/v1/messages"):
        return chat(text, max_tokens)
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": max_tokens}
    if path == "/api/chat":
        messages = chat(text, 0)["messages"]
        return {"messages": messages, "options": {"num_predict": max_tokens}, "stream": False}
    limit = "n_predict" if path == "/completion" else "max_tokens"
    return {"prompt": text, limit: max_tokens, "ignore_eos": True}


OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/completion")
ALL_PATHS = (*OPENAI_PATHS, "/v1/messages", "/api/chat")


@pytest.fixture(scope="module", params=["sliding", "full"])
def refusing(
    request: pytest.FixtureRequest, smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    settings = {"max_kv_size": CONTEXT, "policy": request.param}
    with running_server(smollm2, tmp_path_factory.mktemp("s"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def sliding(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings, folder = {"max_kv_size": CONTEXT, "keep": 4}, tmp_path_factory.mktemp("s")
    with running_server(smollm2, folder, settings=settings, context_policy="slide") as running:
        yield running


def post(server: RunningServer, path: str, json_body: dict[str, Any]) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json=json_body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        *((path, False) for path in OPENAI_PATHS),
        *((path, True) for path in OPENAI_PATHS if path != "/v1/responses"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_in_openais_and_llamacpps_words(
    refusing: RunningServer, path: str, stream: bool
) -> None:
    response = post(refusing, path, {**body(path, LONG), "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["type"]) == (
        "context_length_exceeded",
        "exceed_context_size_error",
    )
    count = error["n_prompt_tokens"]
    assert (error["n_ctx"], count > CONTEXT) == (CONTEXT, True)
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert f"resulted in {count} tokens" in error["message"]
    assert "exceeds the available context size" in error["message"]


def test_the_stream_of_a_response_reports_that_the_prompt_does_not_fit(
    refusing: RunningServer,
) -> None:
    """OpenAI's hosted API sends these events, and Codex reads the error from them."""
    request = {**body("/v1/responses", LONG), "stream": True}
    response = post(refusing, "/v1/responses", request)
    assert response.status_code == 200
    created, in_progress, error, failed = events(response)
    assert [event["type"] for event in (created, in_progress, error, failed)] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    numbers = [event["sequence_number"] for event in events(response)]
    assert numbers == [0, 1, 2, 3]
    details = failed["response"]["error"]
    assert details["code"] == error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in details["message"]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["id"] == created["response"]["id"]
    with refusing.client() as client:  # it is not stored, as others that fail
        assert client.get(f"/v1/responses/{created['response']['id']}").status_code == 404


def test_a_message_that_does_not_fit_is_refused_in_anthropics_words(
    refusing: RunningServer,
) -> None:
    error = post(refusing, "/v1/messages", body("/v1/messages", LONG)).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(f" tokens > {CONTEXT} maximum")


def test_ollama_says_that_a_prompt_does_not_fit(refusing: RunningServer) -> None:
    response = post(refusing, "/api/chat", body("/api/chat", LONG))
    assert response.status_code == 400
    assert "exceeds the available context size" in response.json()["error"]


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(refusing: RunningServer) -> None:
    response = post(refusing, "/v1/completions", {"prompt": [5] * CONTEXT, "max_tokens": 1})
    assert response.json()["error"]["n_prompt_tokens"] == CONTEXT
    response = post(refusing, "/v1/completions", {"prompt": [5] * (CONTEXT - 1), "max_tokens": 1})
    assert response.status_code == 200


def test_a_session_that_is_full_raises_context_full_in_the_client(refusing: RunningServer) -> None:
    with Client(refusing.url) as client:
        session = client.create(policy="full", max_kv_size=32)
        with pytest.raises(ContextFull, match="holds at most 32 tokens"):
            session.feed(LONG)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_an_answer_says_how_much_of_its_prompt_it_forgot(sliding: RunningServer, path: str) -> None:
    response = post(sliding, path, body(path, LONG))
    assert response.status_code == 200, response.text
    forgotten = response.json()["x_kvkeep"]["forgotten_prompt_tokens"]
    assert forgotten > 20
    assert f"and the context holds {CONTEXT}" in response.headers[WARNING]


@pytest.mark.parametrize("path", ALL_PATHS[:-1])
def test_the_end_of_a_stream_says_how_much_was_forgotten(sliding: RunningServer, path: str) -> None:
    request = {**body(path, LONG), "speculate": False}
    whole = post(sliding, path, request).json()
    response = post(sliding, path, {**request, "stream": True})
    assert f"and the context holds {CONTEXT}" in response.headers[WARNING]
    fields = [event.get("response", event).get("x_kvkeep") for event in events(response)]
    assert [found for found in fields if found] == [whole["x_kvkeep"]]


def test_tokens_that_are_evicted_while_the_answer_is_generated_count(
    sliding: RunningServer,
) -> None:
    request = {"prompt": [5] * 60, "max_tokens": 50, "ignore_eos": True, "speculate": False}
    answer = post(sliding, "/v1/completions", request).json()
    # The last token is sampled and not evaluated, unless its cell is needed.
    assert answer["x_kvkeep"]["forgotten_prompt_tokens"] in (60 + 50 - CONTEXT, 60 + 49 - CONTEXT)
    assert "x_kvkeep" not in post(sliding, "/v1/completions", {**request, "max_tokens": 9}).json()


def test_truncation_of_a_response_overrides_the_servers_policy(
    refusing: RunningServer, sliding: RunningServer
) -> None:
    if refusing.service.engine.default_policy == "sliding":
        request = {**body("/v1/responses", LONG), "truncation": "auto"}
        assert post(refusing, "/v1/responses", request).json()["x_kvkeep"]
    request = {**body("/v1/responses", LONG), "truncation": "disabled"}
    assert post(sliding, "/v1/responses", request).status_code == 400


def test_generations_still_slide_where_long_prompts_are_refused(refusing: RunningServer) -> None:
    if refusing.service.engine.default_policy == "sliding":
        answer = post(
            refusing, "/v1/completions", body("/v1/completions", SHORT, max_tokens=2 * CONTEXT)
        ).json()
        assert answer["usage"]["completion_tokens"] == 2 * CONTEXT
