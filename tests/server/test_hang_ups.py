"""A client that hangs up during the prefill of its prompt: the next prompt continues from there."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvkeep.engine import SessionRecord
from kvkeep.model import Model
from tests.scripted_model import model_with_text_of
from tests.server.conftest import RunningServer, running_server

NUM_WORDS = 1500
BODIES: dict[str, str] = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/completion": "n_predict",
}


@pytest.fixture(scope="module")
def slow_server(
    smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Run a server over a small model that waits in each step, so a client can hang up."""
    model = model_with_text_of(tmp_path_factory.mktemp("model"), smollm2.text.folder)
    forward = model.decoder.forward

    def slow_forward(*arguments: Any) -> Any:
        time.sleep(0.05)
        return forward(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.decoder, "forward", slow_forward)
        with running_server(model, tmp_path_factory.mktemp("server")) as running:
            yield running


def body(path: str, first_word: str, **fields: Any) -> dict[str, Any]:
    """Return a request with a long prompt, which begins unlike those of other tests."""
    text = f"{first_word} " + " ".join(str(number % 10) for number in range(NUM_WORDS // 2))
    messages = [{"role": "user", "content": text}]
    prompt = {"messages": messages, "prompt": text, "input": text}
    key = "prompt" if "completion" in path else "input" if "responses" in path else "messages"
    key = "messages" if "chat" in path else key
    return {key: prompt[key], BODIES[path]: 1, "store": False, **fields}


def send_request(server: RunningServer, path: str, fields: dict[str, Any]) -> socket.socket:
    """Send a request without reading the response, and return the connection."""
    url, content = urlsplit(server.url), json.dumps(fields).encode()
    connection = socket.create_connection((url.hostname, url.port))
    headers = f"Host: {url.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
    connection.sendall(f"POST {path} HTTP/1.1\r\n{headers}{len(content)}\r\n\r\n".encode())
    connection.sendall(content)
    return connection


def busy_records(server: RunningServer) -> list[SessionRecord]:
    records = server.service.engine.sessions("0", unnamed=True).result()
    return [record for record in records if record.busy]


def wait_until(condition: Any) -> Any:
    deadline = time.monotonic() + 30
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return result


@pytest.mark.extended
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "which",
    ["slow_server", pytest.param("server", marks=pytest.mark.slow)],
    ids=["small", "default"],
)
def test_the_next_prompt_reuses_what_was_prefilled(
    request: pytest.FixtureRequest, which: str, path: str, stream: bool
) -> None:
    server: RunningServer = request.getfixturevalue(which)
    engine, fields = server.service.engine, body(path, f"{path} {stream}", stream=stream)
    connection = send_request(server, path, fields)

    def prefilled_records() -> list[SessionRecord]:
        return [record for record in busy_records(server) if len(record.live.tokens) >= 256]

    (record,) = wait_until(prefilled_records)
    connection.close()
    wait_until(lambda: not busy_records(server))
    num_prefilled = len(record.live.tokens)
    reused_before = engine.totals().result().reused
    with server.client() as client:
        response = client.post(path, json={**fields, "stream": False})
    assert response.status_code == 200, response.text
    reused = engine.totals().result().reused - reused_before
    assert num_prefilled - 128 <= reused <= num_prefilled
