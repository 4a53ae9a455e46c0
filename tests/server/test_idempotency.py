"""Idempotency keys: a request that is sent twice runs once."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server, serving

from kvkeep.model import Model
from kvkeep.server.idempotency import IdempotencyMiddleware
from kvkeep.server.keys import ApiKeys
from tests.scripted_model import ScriptedEngine, family_model, slowed

names = (f"once-{number}" for number in count())


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def new_session(client: httpx.Client) -> str:
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name}).status_code == 201
    return name


def feed(client: httpx.Client, name: str, key: str, **body: object) -> httpx.Response:
    headers = {"Idempotency-Key": key and f"{name} {key}"}
    return client.post(f"/v1/sessions/{name}/feed", json=body, headers=headers)


def test_a_repeated_request_gets_the_first_response(client: httpx.Client) -> None:
    name = new_session(client)
    first, second = (feed(client, name, "a", tokens=[5, 6, 7]) for _ in range(2))
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 3
    assert feed(client, name, "b", tokens=[5, 6, 7]).json()["total_tokens"] == 6


def test_a_repeated_request_gets_the_first_stream(client: httpx.Client) -> None:
    name = new_session(client)
    body = {"tokens": [5, 6, 7], "stream": True}
    first, second = (feed(client, name, "a", **body) for _ in range(2))
    assert "event: done" in first.text
    assert first.text == second.text
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_request_whose_response_is_too_long_is_not_carried_out_again(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("kvkeep.server.idempotency._MAX_RESPONSE_BYTES", 100)
    name = new_session(client)
    first, second = (feed(client, name, "a", tokens=[5, 6, 7], stream=stream) for _ in range(2))
    assert first.status_code == 200, first.text
    assert (second.status_code, second.json()["error"]["code"]) == (409, "key_answered")
    assert feed(client, name, "a", tokens=[5]).json()["error"]["code"] == "key_reused"
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 3


def test_a_repeated_stream_is_kept_and_sent_as_one_body() -> None:
    """Thousands of events are kept in about the bytes that they have."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(2000):
            await send({"type": "http.response.body", "body": b"%04d" % number, "more_body": True})
        await send({"type": "http.response.body"})

    middleware = IdempotencyMiddleware(app)
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/sessions"}
    scope |= {"owner": "0", "headers": [(b"idempotency-key", b"a")]}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send_thrice() -> list[list[Any]]:
        responses: list[list[Any]] = [[], [], []]
        for response in responses:

            async def send(message: Any, response: list[Any] = response) -> None:
                response.append(dict(message))
                if "headers" in message:  # as middleware around this one does
                    message["headers"] = [*message["headers"], (b"x-added", b"")]

            await middleware(scope, receive, send)
        return responses

    first, second, third = asyncio.run(send_thrice())
    assert first[0] == second[0] == third[0]
    assert [b"".join(message.get("body", b"") for message in first[1:])] == [second[1]["body"]]
    assert (len(first), len(second)) == (2002, 2)
    assert second == third


def test_a_key_cannot_be_reused_for_another_request(client: httpx.Client) -> None:
    name = new_session(client)
    feed(client, name, "a", tokens=[5])
    response = feed(client, name, "a", tokens=[6])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "key_reused"
    assert feed(client, name, "", tokens=[6]).status_code == 400
    assert feed(client, name, "a" * 201, tokens=[6]).status_code == 400
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 1


def test_transient_errors_are_not_recorded(client: httpx.Client) -> None:
    """A refused revision (412) is not recorded: a retry may succeed."""
    name = new_session(client)
    headers = {"Idempotency-Key": f"{name} a", "If-Match": '"1"'}
    path, body = f"/v1/sessions/{name}/feed", {"tokens": [5]}
    assert client.post(path, json=body, headers=headers).status_code == 412
    feed(client, name, "b", tokens=[7])
    assert client.post(path, json=body, headers=headers).status_code == 200


def start_and_disconnect(server: RunningServer, name: str, count: int, key: str) -> httpx.Request:
    """Let a request generate tokens, and close its connection in the middle."""
    body = {"tokens": [5], "max_tokens": count, "ignore_eos": True}
    with server.client() as client:
        request = client.build_request(
            *("POST", f"/v1/sessions/{name}/generate"),
            json=body,
            headers={"Idempotency-Key": key},
            timeout=httpx.Timeout(120, read=0.05),
        )
        with pytest.raises(httpx.ReadTimeout):
            client.send(request)
    request.extensions = {"timeout": httpx.Timeout(120).as_dict()}
    return request


def test_a_request_whose_connection_is_lost_is_not_carried_out_in_part(
    server: RunningServer, client: httpx.Client
) -> None:
    name = new_session(client)
    request = start_and_disconnect(server, name, 100, f"{name} a")
    while (response := client.send(request)).status_code == 409:
        assert response.json()["error"]["code"] == "key_at_work"
        time.sleep(0.1)
    assert len(response.json()["tokens"]) == 100
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 101


def test_a_request_that_is_not_sent_again_is_cancelled(
    server: RunningServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.server.idempotency._RETRY_SECONDS", 0.1)
    name = new_session(client)
    start_and_disconnect(server, name, 1500, f"{name} a")
    while (session := client.get(f"/v1/sessions/{name}").json())["busy"]:
        time.sleep(0.1)
    assert session["tokens"] < 1501


def run_app(app: Any, *requests: tuple[str, str]) -> list[list[Any]]:
    """Send requests, each a path and a key, in this order; return the messages of each."""

    async def send_all() -> list[list[Any]]:
        middleware, responses = IdempotencyMiddleware(app), []
        tasks = []
        for path, key in requests:
            scope = {"type": "http", "method": "POST", "path": path, "owner": "0"}
            scope["headers"] = [(b"idempotency-key", key.encode())]
            body, messages = iter([{"type": "http.request", "body": b"{}"}]), list[Any]()

            async def receive(body: Iterator[Any] = body) -> Any:
                return next(body, None) or await asyncio.Event().wait()

            async def send(message: Any, messages: list[Any] = messages) -> None:
                messages.append(message)

            tasks.append(asyncio.create_task(middleware(scope, receive, send)))
            responses.append(messages)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return responses

    return asyncio.run(send_all())


def test_a_request_that_runs_keeps_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others complete meanwhile; of these the newest are remembered."""
    monkeypatch.setattr("kvkeep.server.idempotency._MAX_KEYS", 3)
    runs = Counter[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        runs[path] += 1
        for _ in range(100 if path.endswith("slow") else 0):
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    slow, quick = "/v1/sessions/slow", "/v1/sessions/quick"
    others = [(quick, f"key {number}") for number in range(5)]
    responses = run_app(app, (slow, "key"), *others, (slow, "key"), others[4], others[0])
    statuses = [messages[0]["status"] for messages in responses]
    assert statuses == [200, *[200] * 5, 409, 200, 200]
    assert runs == {slow: 1, quick: 6}  # of the others only the oldest was forgotten


@pytest.mark.parametrize(
    ("content_type", "event"),
    [
        ("text/event-stream", 'event: error\ndata: {"error": {"message": "m"}}\n\n'),
        ("text/event-stream", 'data: {"error": {"message": "m"}}\n\n'),
        ("text/event-stream", 'event: error\ndata: {"type": "error", "error": {}}\n\n'),
        ("text/event-stream", 'data: {"type": "response.failed", "response": {}}\n\n'),
        ("application/x-ndjson", '{"error": "m"}\n'),
    ],
)
def test_a_stream_that_failed_is_not_remembered(content_type: str, event: str) -> None:
    runs: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(scope["path"])
        fails = scope["path"].endswith("fails")
        headers = [(b"content-type", content_type.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        events = ['data: {"text": "a", "error": null}\n\n', event if fails else "", "data: [DONE]"]
        for body in (*events, ": keepalive\n\n", ""):
            message = {"type": "http.response.body", "body": body.encode(), "more_body": body != ""}
            await send(message)

    fails, succeeds = "/v1/sessions/fails", "/v1/sessions/succeeds"
    run_app(app, (fails, "a"), (succeeds, "b"), (fails, "a"), (succeeds, "b"))
    assert sorted(runs) == [fails, fails, succeeds]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_detached_turn_is_repeated_once_it_is_complete(tmp_path: Path, streams: bool) -> None:
    """Its connection was lost; meanwhile a retry is refused."""
    model = family_model(tmp_path / "m", [])
    answer = "Hello there, this is an answer."
    engine = ScriptedEngine(model, lambda prompt: answer, settings={"max_kv_size": 512})
    path, key = "/v1/sessions/a/turns", {"Idempotency-Key": "k"}
    body = {"content": "Hi", "stream": streams, "detached": True}
    with slowed(model), serving(engine) as server, server.client() as client:
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        if streams:  # the first event shows that the turn was admitted
            with client.stream("POST", path, json=body, headers=key) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, headers=key, timeout=httpx.Timeout(120, read=0.05))
        while not client.get("/v1/sessions/a").json()["busy"]:
            pass
        while (response := client.post(path, json=body, headers=key)).status_code == 409:
            assert response.json()["error"]["code"] == "key_at_work"
            time.sleep(0.05)
        assert response.status_code == 200
        assert answer in response.text
        assert set(client.get("/v1/sessions/a").json()["spans"]) >= {"turn 1 answer"}
        assert "turn 2" not in client.get("/v1/sessions/a").json()["spans"]


def test_keys_belong_to_their_owner(
    smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("server")
    file = folder / "keys"
    file.write_text("the-first-of-the-keys\nthe-second-of-the-keys\n")
    with running_server(smollm2, folder, ApiKeys.read(file, folder)) as server:
        for key in file.read_text().split():
            with server.client(key) as client:
                client.post("/v1/sessions", json={"name": "same"})
                response = feed(client, "same", "a", tokens=[5, 6])
                assert response.json()["total_tokens"] == 2
                assert client.get("/v1/sessions/same").json()["tokens"] == 2
