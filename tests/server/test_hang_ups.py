"""A client that hangs up during the prefill of its prompt: the next prompt continues from there."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvkeep.engine import Limits, SessionRecord
from kvkeep.model import Model
from tests.scripted_model import model_with_text_of, slowed
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
    with slowed(model), running_server(model, tmp_path_factory.mktemp("server")) as running:
        yield running


def body(path: str, first_word: str, **fields: Any) -> dict[str, Any]:
    """Return a request with a long prompt, which begins unlike those of other tests."""
    text = f"{first_word} " + " ".join(str(number % 10) for number in range(NUM_WORDS // 2))
    messages = [{"role": "user", "content": text}]
    prompt = {"messages": messages, "prompt": text, "input": text}
    key = "prompt" if "completion" in path else "input" if "responses" in path else "messages"
    key = "messages" if "chat" in path else key
    return {key: prompt[key], BODIES[path]: 1, "store": False, **fields}


def send_request(
    server: RunningServer, path: str, fields: dict[str, Any], key: str = ""
) -> socket.socket:
    """Send a request without reading the response, and return the connection."""
    url, content = urlsplit(server.url), json.dumps(fields).encode()
    connection = socket.create_connection((url.hostname, url.port))
    headers = f"Host: {url.netloc}\r\nContent-Type: application/json\r\n"
    headers += f"Idempotency-Key: {key}\r\n" if key else ""
    headers += "Content-Length: "
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


def begin_turn(server: RunningServer, name: str, **fields: Any) -> socket.socket:
    """Begin a turn in a new session, hang up after some tokens; return when that is noticed."""
    ends = {str(token): -100 for token in server.service.model.end_token_ids}
    turn = {"content": "The sea", "stream": True, "temperature": 0, "logit_bias": ends, **fields}
    with server.client() as client:
        client.post("/v1/sessions", json={"name": name}).raise_for_status()
    connection = send_request(server, f"/v1/sessions/{name}/turns", turn)
    assert wait_until(lambda: connection.recv(1 << 16).count(b"event: token"))
    return connection


@pytest.mark.parametrize("detached", [False, True])
def test_an_answer_goes_on_without_its_client_if_it_is_detached(
    slow_server: RunningServer, detached: bool
) -> None:
    name, count = f"gone-{detached}", 30
    begin_turn(slow_server, name, detached=detached, max_tokens=count).close()
    wait_until(lambda: not busy_records(slow_server))
    with slow_server.client() as client:
        answer = client.get(f"/v1/sessions/{name}/memory").json()["spans"]["turn 1 answer"]
    assert (answer["end"] - answer["start"] >= count) == detached


def test_an_answer_is_stopped_by_another_client(slow_server: RunningServer) -> None:
    connection = begin_turn(slow_server, "long", detached=True, max_tokens=10_000)
    with slow_server.client() as client:
        entry = client.post("/v1/sessions/long/stop").json()
        again = client.post("/v1/sessions/long/stop").json()
        spans = client.get("/v1/sessions/long/memory").json()["spans"]
        assert client.post("/v1/sessions/none/stop").status_code == 404
    assert (entry["busy"], again["revision"]) == (False, entry["revision"])
    assert spans["turn 1 answer"]["end"] == entry["tokens"]
    connection.settimeout(30)
    rest = b""
    while b"event: error" not in rest or b"}" not in rest.split(b"event: error")[1]:
        rest += connection.recv(1 << 16) or pytest.fail(f"closed after {rest!r}")
    assert b"cancelled" in rest.split(b"event: error")[1]


@pytest.mark.parametrize("path", [*BODIES, "/api/chat", "/v1/sessions/brief/turns"])
def test_a_stream_ends_with_a_client_that_is_gone_before_its_first_event(
    slow_server: RunningServer, path: str
) -> None:
    ends = {str(token): -100 for token in slow_server.service.model.end_token_ids}
    fields: dict[str, Any] = {"prompt": "a", "input": "a", "content": "a", "logit_bias": ends}
    fields |= {"messages": [{"role": "user", "content": "a"}], BODIES.get(path, "max_tokens"): 1500}
    if path == "/api/chat":
        fields |= {"options": {"num_predict": 1500, "logit_bias": ends}}
    with slow_server.client() as client:
        if path.endswith("turns"):
            client.post("/v1/sessions", json={"name": "brief"}).raise_for_status()
        for milliseconds in (0, 2, 10):
            connection = send_request(slow_server, path, {**fields, "stream": True})
            time.sleep(milliseconds / 1000)
            connection.close()
        # It is admitted after those.
        client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}).raise_for_status()
    wait_until(lambda: not busy_records(slow_server))
    assert not slow_server.service.pending_responses


@pytest.mark.parametrize(("stream", "key"), [(False, ""), (True, ""), (True, "key")])
def test_a_turn_that_waits_for_room_is_given_up_with_its_client(
    smollm2: Model, tmp_path: Path, stream: bool, key: str
) -> None:
    """It would begin, unseen, when there is room again, also if it is detached."""
    model = model_with_text_of(tmp_path / "model", smollm2.text.folder)
    limits = Limits(running=1)
    with slowed(model), running_server(model, tmp_path / "server", limits=limits) as server:
        with closing(begin_turn(server, "working", max_tokens=100_000)), server.client() as client:
            client.post("/v1/sessions", json={"name": "waiting"}).raise_for_status()
            turn = {"content": "Hi", "max_tokens": 2, "detached": True, "stream": stream}
            waiting = server.service.admission_queue._waiting
            with closing(send_request(server, "/v1/sessions/waiting/turns", turn, key)):
                wait_until(lambda: waiting.get("0"))
            start = time.monotonic()
            wait_until(lambda: not waiting.get("0"))
            assert time.monotonic() - start < 8  # a retry of another request is expected for ten
        wait_until(lambda: not busy_records(server))
        assert server.service.engine.find("waiting").result().live.tokens == []


CHANGES: dict[str, dict[str, Any]] = {
    "align": {"mode": "exact", "tokens": list(range(21, 420))},
    "compress": {"ratio": 2.0, "method": "kvzip"},
    "compact": {"target": 128, "keep_recent": 0},
    "edit": {"op": "delete", "start": 2, "end": 4, "recompute": "suffix"},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_long_change_is_not_made_for_a_client_that_is_gone(
    slow_server: RunningServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    engine, path = slow_server.service.engine, f"/v1/sessions/{kind}"
    yield_turn = engine.yield_turn

    def never_return(tokens: int = 0) -> None:
        while True:
            yield_turn(tokens)
            time.sleep(0.001)

    with slow_server.client() as client:
        settings = {"policy": "full", "max_kv_size": 512}
        client.post("/v1/sessions", json={"name": kind, **settings}).raise_for_status()
        client.post(f"{path}/feed", json={"tokens": list(range(20, 420))}).raise_for_status()
        before = [client.get(path + view).json() for view in ("", "/text", "/memory")]
        monkeypatch.setattr(engine, "yield_turn", never_return)
        with closing(send_request(slow_server, f"{path}/{kind}", CHANGES[kind])):
            wait_until(lambda: client.get(path).json()["busy"])
        wait_until(lambda: not client.get(path).json()["busy"])
        after = [client.get(path + view).json() for view in ("", "/text", "/memory")]
        assert [each["revision"] for each in after] == [each["revision"] for each in before]
        assert after[1] == before[1]
        assert after[2]["runs"] == before[2]["runs"]
        monkeypatch.undo()
        client.post(f"{path}/{kind}", json=CHANGES[kind]).raise_for_status()
