"""Answers on a fleet that go on without their client, and those that another client stops."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fleet.conftest import Replica, replica

from kvkeep.fleet import leases
from kvkeep.model import Model
from kvkeep.storage.objects import ObjectStore
from tests.scripted_model import model_with_text_of

Serve = Callable[..., Replica]
MANY = 10_000  # tokens: an answer that does not end by itself
KEY = {"Idempotency-Key": "k"}
with_or_without_key = pytest.mark.parametrize("headers", [{}, KEY], ids=["no key", "key"])


@pytest.fixture(scope="module")
def slow_model(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Return a small model that waits in each step, so that an answer can be interrupted."""
    model = model_with_text_of(tmp_path_factory.mktemp("model"), smollm2.text.folder)
    forward = model.decoder.forward

    def slow_forward(*arguments: Any) -> Any:
        time.sleep(0.05)
        return forward(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.decoder, "forward", slow_forward)
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
    path = "/v1/sessions/s/turns"
    with client.stream("POST", path, json=body, headers=headers) as response:
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
            repeated = b.post("/v1/sessions/s/turns", json=body, headers=headers)
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
