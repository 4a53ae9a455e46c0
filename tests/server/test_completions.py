"""Completions by OpenAI's own client."""

import json
from typing import Any

import httpx
import openai
import pytest
from server.conftest import Running

from kvkeep.model import Model

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def completed(client: openai.OpenAI, prompt: Any = PROMPT, **asked: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 10, **asked}
    return client.completions.create(model="smollm2", prompt=prompt, **asked)


def test_it_goes_on_as_a_session_does(client: openai.OpenAI, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(PROMPT)
    expected = "".join(session.stream(10))
    for prompt in (PROMPT, [PROMPT], smollm2.text.encode(PROMPT), [smollm2.text.encode(PROMPT)]):
        assert completed(client, prompt).choices[0].text == expected
    assert completed(client, echo=True).choices[0].text == PROMPT + expected


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = completed(client, logprobs=2)
    chunks = list(completed(client, stream=True, logprobs=2))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens
    assert len(tokens) == 10
    assert all(len(top) == 2 for top in whole.choices[0].logprobs.top_logprobs)


def test_nothing_may_be_asked_to_be_written(client: openai.OpenAI) -> None:
    found = completed(client, max_tokens=0)
    assert found.choices[0].text == ""
    assert found.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [10**6]},
        {"prompt": [10**30]},
        {"prompt": ["a", "b"]},
        {"prompt": None},
        {"prompt": "a", "n": 1000},
        {"prompt": "a", "logprobs": 1000},
        {"prompt": "a", "max_tokens": -2},
        {"prompt": "a", "seed": 10**30},
        {"prompt": "\ud800"},
    ],
    ids=repr,
)
def test_what_is_malformed_is_refused(server: Running, body: dict[str, Any]) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"prompt"', b"\xff\xfe", b"1" * 5000])
def test_what_is_no_json_is_refused(server: Running, content: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=content)
    assert answer.status_code == 400


@pytest.mark.parametrize("streamed", [True, False])
def test_nothing_to_go_on_from_is_refused_before_a_stream_begins(
    server: Running, streamed: bool
) -> None:
    with server.client() as client:
        body = {"prompt": "", "stream": streamed}
        assert client.post("/v1/completions", json=body).status_code == 400
        name = client.post("/v1/sessions", json={}).json()["name"]
        asked = client.post(f"/v1/sessions/{name}/generate", json={"stream": streamed})
        assert asked.status_code == 400
        assert "nothing to continue" in asked.json()["error"]["message"]
