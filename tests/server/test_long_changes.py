"""Requests during a long change of a session: all but those that change it are answered."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

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
