"""Prompts longer than the context: in words that clients act on, or reported."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvkeep.model import Model
from tests.server.conftest import RunningServer, running_server

BUDGET = 128
LONG = "one two three four five six seven eight nine ten " * 20
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/completion": {"prompt": LONG, "n_predict": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
}


def post(server: RunningServer, path: str) -> httpx.Response:
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    with server.client() as client:
        return client.post(path, json={"temperature": 0, limit: 2, **REQUESTS[path]})


@pytest.fixture(scope="module")
def full_server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = {"policy": "full", "max_kv_size": BUDGET}
    folder = tmp_path_factory.mktemp("full")
    with running_server(smollm2, folder, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def sliding_server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = {"policy": "sliding", "max_kv_size": BUDGET}
    folder = tmp_path_factory.mktemp("sliding")
    with running_server(smollm2, folder, settings=settings) as running:
        yield running


def check_refusal(response: httpx.Response, path: str) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(f" tokens > {BUDGET} maximum")
        return
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {BUDGET} tokens" in error["message"]
    assert "exceeds the available context size" in error["message"]
    assert error["n_ctx"] == BUDGET < error["n_prompt_tokens"]


@pytest.mark.parametrize("path", REQUESTS)
def test_a_full_policy_refuses_in_the_words_of_each_api(
    full_server: RunningServer, path: str
) -> None:
    check_refusal(post(full_server, path), path)


@pytest.mark.parametrize("path", REQUESTS)
def test_a_server_may_refuse_what_its_policy_would_evict(
    sliding_server: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert post(sliding_server, path).status_code == 200
    monkeypatch.setattr(sliding_server.service, "context_policy", "refuse")
    check_refusal(post(sliding_server, path), path)


def test_generations_still_slide_where_long_prompts_are_refused(
    sliding_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliding_server.service, "context_policy", "refuse")
    body = {"prompt": "Once upon a time", "max_tokens": 2 * BUDGET, "ignore_eos": True}
    with sliding_server.client() as client:
        response = client.post("/v1/completions", json=body).json()
    assert response["usage"]["completion_tokens"] == 2 * BUDGET
