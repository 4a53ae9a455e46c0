"""Requests during a long change of a session: all but those that change it are answered."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvkeep import load_model
from kvkeep.model import Model
from tests.server.conftest import RunningServer, running_server

LONG = "The harbour of the old town has seen many ships come and go. " * 16
READS = ("", "/text", "/memory", "/heads")
CHANGES: dict[str, dict[str, Any]] = {
    "align": {"mode": "exact", "text": "Once, " + LONG},
    "compress": {"ratio": 2.0, "method": "kvzip"},
    "compact": {"target": 128},
    "edit": {"op": "delete", "start": 2, "end": 4, "recompute": "suffix"},
}
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def full_server(
    smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("changes")
    settings = {"max_kv_size": 512, "policy": "full"}
    with running_server(smollm2, folder, settings=settings) as running:
        yield running


def wait_until_changing(client: httpx.Client, name: str) -> None:
    deadline = time.monotonic() + 60
    while not client.get(f"/v1/sessions/{name}").json()["busy"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", CHANGES)
def test_others_are_answered_during_a_long_change(
    full_server: RunningServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its own session reads as before it, and what others do to it changes no bit of it."""
    engine, is_held = full_server.service.engine, True
    yield_turn, path = engine.yield_turn, f"/v1/sessions/{kind}"

    def hold(tokens: int = 0) -> None:
        yield_turn(tokens)
        while is_held:
            time.sleep(0.001)
            yield_turn()

    with full_server.client() as client, ThreadPoolExecutor(2) as threads:
        for name in (kind, f"{kind}-other"):
            client.post("/v1/sessions", json={"name": name})
            client.post(f"/v1/sessions/{name}/feed", json={"text": LONG})
        client.post(f"{path}/fork", json={"name": f"{kind}-quiet"})
        text = client.get(f"{path}/text").json()["pieces"]
        monkeypatch.setattr(engine, "yield_turn", hold)
        change = threads.submit(client.post, f"{path}/{kind}", json=CHANGES[kind])
        wait_until_changing(client, kind)
        for read in READS:
            assert client.get(path + read).status_code == 200
        for read in ("sessions", "operations", "prefix/misses", "prefix/pins", "models"):
            assert client.get(f"/v1/{read}").status_code == 200
        for read in ("/metrics", "/health", "/slots", "/api/ps"):
            assert client.get(read).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.post("/v1/completions", json={"prompt": LONG, **GREEDY}).status_code == 200
        assert client.get(f"{path}/text").json()["pieces"] == text
        for action, body in (("generate", GREEDY), ("rewind", {"count": 1}), ("save", {})):
            status = client.post(f"{path}/{action}", json=body).status_code
            assert status == (200 if action == "save" else 409), action
        assert client.delete(path).status_code == 409
        assert client.post(f"{path}/fork", json={"name": f"{kind}-fork"}).status_code == 201
        other = f"/v1/sessions/{kind}-other"
        assert client.post(f"{other}/rewind", json={"count": 1}).status_code == 200
        later = threads.submit(client.post, f"{other}/{kind}", json=CHANGES[kind])
        assert client.post(f"{other}/generate", json=GREEDY).status_code == 200
        assert not change.done()
        assert not later.done()  # one long change at a time
        is_held = False
        assert change.result().status_code == later.result().status_code == 200
        monkeypatch.undo()
        quiet = f"/v1/sessions/{kind}-quiet"
        assert client.post(f"{quiet}/{kind}", json=CHANGES[kind]).status_code == 200
        answers = [
            client.post(f"{session}/generate", json=GREEDY).json()["tokens"]
            for session in (path, quiet)
        ]
        assert answers[0] == answers[1]
        forked = client.get(f"/v1/sessions/{kind}-fork/text").json()["pieces"]
        assert forked == text


@pytest.fixture(scope="module")
def hybrid_server(
    hybrid_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Run a server whose sessions keep states and no checkpoints."""
    model, folder = load_model(hybrid_folder, dtype="float32"), tmp_path_factory.mktemp("states")
    settings = {"max_kv_size": 2048, "policy": "full", "checkpoint_bytes": 0}
    with running_server(model, folder, settings=settings) as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("rewind", {"count": 10}),
        ("fork", {"at": 390, "name": "fork-result"}),
        ("edit", {"op": "delete", "start": 390, "end": 400, "recompute": "suffix"}),
    ],
)
def test_others_are_answered_while_states_are_computed_anew(
    hybrid_server: RunningServer, monkeypatch: pytest.MonkeyPatch, kind: str, body: dict[str, Any]
) -> None:
    """In each of its steps; the session reads as before it, and changes as in Python."""
    engine, tokens, held = hybrid_server.service.engine, list(range(3, 403)), list[int]()
    yield_turn, path, is_held = engine.yield_turn, f"/v1/sessions/states-{kind}", True

    def hold(num_tokens: int = 0) -> None:
        yield_turn(num_tokens)
        held.append(num_tokens)
        while is_held:
            time.sleep(0.001)
            yield_turn()

    with hybrid_server.client() as client, ThreadPoolExecutor(1) as threads:
        client.post("/v1/sessions", json={"name": f"states-{kind}"}).raise_for_status()
        client.post(f"{path}/feed", json={"tokens": tokens}).raise_for_status()
        alone = engine.inspect(f"states-{kind}", "0", lambda record: record.live.fork()).result()
        alone.rewind(10)
        monkeypatch.setattr(engine, "yield_turn", hold)
        change = threads.submit(client.post, f"{path}/{kind}", json=body)
        try:
            deadline = time.monotonic() + 60
            while not held and not change.done():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert client.get(path).json()["tokens"] == 400
            assert client.get(f"{path}/text").status_code == 200
            assert (
                client.post("/v1/completions", json={"prompt": "Hi", **GREEDY}).status_code == 200
            )
            assert not change.done()
        finally:
            is_held = False
        assert change.result().is_success
        monkeypatch.undo()
        assert held == [128, 128, 128, 5]  # and the last token that stays
        changed = "/v1/sessions/fork-result" if kind == "fork" else path
        assert client.get(changed).json()["tokens"] == 390
        answer = client.post(f"{changed}/generate", json=GREEDY).json()["tokens"]
        assert answer == [alone.next_token() for _ in range(4)]


def test_a_fork_that_evaluates_again_is_of_the_session_as_it_was(
    hybrid_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the session is changed and deleted meanwhile."""
    engine, tokens = hybrid_server.service.engine, list(range(3, 403))
    yield_turn, path, requests = engine.yield_turn, "/v1/sessions/parent", list[int]()

    with hybrid_server.client() as client, hybrid_server.client() as other:
        client.post("/v1/sessions", json={"name": "parent"}).raise_for_status()
        client.post(f"{path}/feed", json={"tokens": tokens}).raise_for_status()

        def change(num_tokens: int = 0) -> None:
            yield_turn(num_tokens)
            if not requests:
                with ThreadPoolExecutor(1) as threads:
                    for send in (
                        lambda: other.post(f"{path}/rewind", json={"count": 400}),
                        lambda: other.delete(path),
                    ):
                        response = threads.submit(send)
                        while not response.done():
                            yield_turn()
                        requests.append(response.result().status_code)

        monkeypatch.setattr(engine, "yield_turn", change)
        forked = client.post(f"{path}/fork", json={"at": 390, "name": "child"})
        assert (forked.status_code, requests) == (201, [200, 200])
        pieces = client.get("/v1/sessions/child/text").json()["pieces"]
        assert [piece["id"] for piece in pieces] == tokens[:390]
