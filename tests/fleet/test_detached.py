"""Answers on a fleet that go on without their client, and those that another client stops."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fleet.conftest import Replica, replica
from timeouts import PATIENCE

from kvkeep.fleet import leases
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.storage.snapshots.snapshot import Snapshot
from tests.scripted_model import model_with_text_of, slowed

Serve = Callable[..., Replica]
MANY = 10_000  # tokens: an answer that does not end by itself
TURNS, STOP = "/v1/sessions/s/turns", "/v1/sessions/s/stop"
KEY = {"Idempotency-Key": "k"}
with_or_without_key = pytest.mark.parametrize("headers", [{}, KEY], ids=["no key", "key"])


@pytest.fixture(scope="module")
def slow_model(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Return a small model that waits in each step, so that an answer can be interrupted."""
    model = model_with_text_of(tmp_path_factory.mktemp("model"), smollm2.text.folder)
    with slowed(model):
        yield model


@pytest.fixture
def serve(slow_model: Model, objects: ObjectStore) -> Iterator[Serve]:
    """Return a function that runs a server over the store, the first one with long leases.

    So no other server takes its sessions on a busy machine. Others do not wait long for them.
    """
    lease_seconds = {"a": 60.0, "b": 0.3}
    with ExitStack() as stack:

        def serve(name: str) -> Replica:
            server = replica(slow_model, objects, name, lease_seconds[name], grace=1)
            return stack.enter_context(server)

        yield serve


def turn(model: Model, **fields: Any) -> dict[str, Any]:
    """Return a turn's body with an answer that no end token ends."""
    ends = {str(token): -100 for token in model.end_token_ids}
    return {"content": "The sea", "temperature": 0, "logit_bias": ends, "stream": True, **fields}


def begin_turn(client: httpx.Client, body: dict[str, Any], **headers: str) -> None:
    """Send a turn to session "s", and hang up after its first token."""
    with client.stream("POST", TURNS, json=body, headers=headers) as response:
        assert any(line.startswith("event: token") for line in response.iter_lines())


def create(client: httpx.Client) -> None:
    assert client.post("/v1/sessions", json={"name": "s"}).status_code == 201


def answer_length(client: httpx.Client) -> int:
    """Wait until the server can change session "s", and return the length of its answer."""
    deadline = time.monotonic() + 60
    while client.put("/v1/sessions/s/title", json={"title": "Sea"}).status_code == 409:
        assert time.monotonic() < deadline
    span = client.get("/v1/sessions/s/memory").json()["spans"]["turn 1 answer"]
    return int(span["end"] - span["start"])


@with_or_without_key
def test_a_detached_answer_is_committed_once_it_is_complete(
    serve: Serve, slow_model: Model, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """It takes longer than the last step of a cancelled generation may."""
    monkeypatch.setattr(leases, "_IDLE_TIMEOUT_SECONDS", 0.2)
    body = turn(slow_model, detached=True, max_tokens=30)
    with serve("a").client() as a, serve("b").client() as b:
        create(a)
        begin_turn(a, body, **headers)
        assert answer_length(b) >= 30
        if headers:
            repeated = b.post(TURNS, json=body, headers=headers)
            assert "event: done" in repeated.text
            assert answer_length(b) < 60


@with_or_without_key
def test_a_detached_answer_is_committed_when_its_server_ends(
    slow_model: Model, objects: ObjectStore, serve: Serve, headers: dict[str, str]
) -> None:
    with replica(slow_model, objects, "a", grace=1) as a, a.client() as client:
        create(client)
        begin_turn(client, turn(slow_model, detached=True, max_tokens=MANY), **headers)
    with serve("b").client() as b:
        assert answer_length(b) >= 1


@with_or_without_key
def test_an_answer_is_stopped_by_another_client(
    serve: Serve, slow_model: Model, headers: dict[str, str]
) -> None:
    body = turn(slow_model, detached=True, max_tokens=MANY)
    with serve("a").client() as a, serve("b").client() as b, ThreadPoolExecutor() as pool:
        create(a)
        revision = a.get("/v1/sessions/s").json()["revision"]
        with a.stream("POST", TURNS, json=body, headers=headers) as response:
            lines = response.iter_lines()
            assert any(line.startswith("event: token") for line in lines)
            rest = pool.submit("".join, lines)
            held = b.post(STOP)
            assert (held.status_code, held.json()["error"]["code"]) == (409, "held")
            stale = a.post(STOP, headers={"If-Match": f'"{revision + 1}"'})
            assert stale.status_code == 412
            stopped = a.post(STOP, headers={"If-Match": f'"{revision}"'})
            assert (stopped.status_code, stopped.json()["busy"]) == (200, False)
            committed = b.get("/v1/sessions/s").json()
            assert committed["revision"] == stopped.json()["revision"]
            assert "cancelled" in rest.result().split("event: error")[1]
        assert answer_length(b) >= 1
        if headers:
            repeated = b.post(TURNS, json=body, headers=headers)
            assert "cancelled" in repeated.text.split("event: error")[1]


def test_an_answer_is_stopped_that_is_about_to_begin(
    serve: Serve, slow_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, may_load, load = threading.Event(), threading.Event(), Snapshot.load

    def load_slowly(path: ReadablePath) -> Snapshot:
        loading.set()
        assert may_load.wait(60)
        return load(path)

    body = turn(slow_model, detached=True, max_tokens=MANY, stream=False)
    with serve("a").client() as a, serve("b").client() as b, ThreadPoolExecutor() as pool:
        create(a)
        monkeypatch.setattr(Snapshot, "load", load_slowly)
        answer = pool.submit(b.post, TURNS, json=body)
        assert loading.wait(60)
        stopped = pool.submit(b.post, STOP)
        may_load.set()
        assert stopped.result().json()["busy"] is False
        assert answer.result().json()["error"]["code"] == "cancelled"


def test_a_session_without_an_answer_has_none_to_stop(serve: Serve) -> None:
    with serve("a").client() as client:
        create(client)
        entry = client.get("/v1/sessions/s").json()
        assert client.post(STOP).json()["revision"] == entry["revision"]
        assert client.post("/v1/sessions/none/stop").status_code == 404


def test_a_drain_leaves_requests_that_have_changed_nothing_once_its_time_is_over(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And releases their sessions."""
    begun, may_go_on, encode = threading.Event(), threading.Event(), TextCodec.encode

    def encode_slowly(codec: TextCodec, text: str, *arguments: bool) -> list[int]:
        if text == "slow":
            begun.set()
            may_go_on.wait()
        return encode(codec, text, *arguments)

    monkeypatch.setattr(TextCodec, "encode", encode_slowly)
    server = serve("a")
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        create(client)
        feed = "/v1/sessions/s/feed"
        stuck = threads.submit(client.post, feed, json={"text": "slow"})
        assert begun.wait(PATIENCE)
        (task,) = server.leases.request_tasks
        drain = server.leases.drain(lambda: 0.0)
        asyncio.run_coroutine_threadsafe(drain, task.get_loop()).result(PATIENCE)
        assert not server.leases.request_tasks
        with serve("b").client() as other:
            assert other.post(feed, json={"tokens": [5, 6]}).json()["total_tokens"] == 2
        may_go_on.set()
        assert stuck.result().status_code == 503
