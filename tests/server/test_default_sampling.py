"""Requests without sampling parameters use the model's default sampling, in every API."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer

from kvkeep.engine.steps import DEFAULT_PREFILL_STEP, StepGrid
from kvkeep.model import Model

PROMPT = "Describe a village by the sea."
MESSAGES = [{"role": "user", "content": PROMPT}]
SEED, LENGTH = 5, 12
names = (f"defaults-{number}" for number in count())


def chat_completion(client: httpx.Client, **params: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": LENGTH, **params}
    response = client.post("/v1/chat/completions", json=body).json()
    return str(response["choices"][0]["message"]["content"])


def completion(client: httpx.Client, **params: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": LENGTH, **params}
    return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


def response(client: httpx.Client, **params: Any) -> str:
    body = {"input": PROMPT, "max_output_tokens": LENGTH, "store": False, **params}
    output = client.post("/v1/responses", json=body).json()["output"]
    return str(output[0]["content"][0]["text"])


def message(client: httpx.Client, **params: Any) -> str:
    body = {"model": "smollm2", "messages": MESSAGES, "max_tokens": LENGTH, **params}
    return str(client.post("/v1/messages", json=body).json()["content"][0]["text"])


def llamacpp_completion(client: httpx.Client, **params: Any) -> str:
    body = {"prompt": PROMPT, "n_predict": LENGTH, **params}
    return str(client.post("/completion", json=body).json()["content"])


def session_action(client: httpx.Client, action: str, **body: Any) -> str:
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name}).status_code == 201
    path = f"/v1/sessions/{name}/{action}"
    return str(client.post(path, json={"max_tokens": LENGTH, **body}).json()["text"])


def generation(client: httpx.Client, **params: Any) -> str:
    return session_action(client, "generate", text=PROMPT, **params)


def turn(client: httpx.Client, **params: Any) -> str:
    return session_action(client, "turns", content=PROMPT, **params)


CHATS = (chat_completion, response, turn)
COMPLETIONS = (completion, llamacpp_completion, generation)


@pytest.mark.parametrize("request_text", [*CHATS, *COMPLETIONS])
def test_the_defaults_are_the_models(
    server: RunningServer, smollm2: Model, request_text: Callable[..., str]
) -> None:
    """The text is that of a session in Python with the model's default sampling.

    Prompts are evaluated in the steps of a server, which end with messages.
    """
    session = smollm2.session(2048)
    session.prefill_step = DEFAULT_PREFILL_STEP
    prompt = smollm2.text.chat(MESSAGES) if request_text in CHATS else PROMPT
    ids, grid = smollm2.text.encode(prompt), StepGrid.of(session)
    feeding = session.feeding(ids)
    while feeding.done < feeding.total:
        feeding.step(grid.next_end(ids, feeding.done))
    sampling = replace(smollm2.default_sampling, seed=SEED)
    with server.client() as client:
        assert request_text(client, seed=SEED) == "".join(session.stream(LENGTH, sampling))


@pytest.mark.parametrize("request_text", [*CHATS, *COMPLETIONS, message])
def test_no_default_is_greedy(server: RunningServer, request_text: Callable[..., str]) -> None:
    with server.client() as client:
        # A text may be empty: one in six ends at once.
        first = request_text(client)
        assert any(request_text(client) != first for _ in range(7))
        assert len({request_text(client, temperature=0) for _ in range(2)}) == 1


def test_llamacpp_properties_report_the_defaults(server: RunningServer) -> None:
    with server.client() as client:
        params = client.get("/props").json()["default_generation_settings"]["params"]
    expected = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert expected.items() <= params.items()
    assert (params["repeat_penalty"], params["repeat_last_n"]) == (1.1, 256)
