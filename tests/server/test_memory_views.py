"""The views of a session whose model keeps states: what its parts take, and what a rewind costs."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.conftest import running_server

import kvkeep


@pytest.fixture(scope="module")
def client(hybrid_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model, folder = kvkeep.load_model(hybrid_folder, dtype="float32"), tmp_path_factory.mktemp("s")
    with running_server(model, folder) as running, running.client() as client:
        yield client


def test_a_session_shows_its_states_and_checkpoints(client: httpx.Client) -> None:
    assert client.post("/v1/sessions", json={"name": "a", "policy": "full"}).status_code == 201
    tokens = list(range(3, 403))
    client.post("/v1/sessions/a/feed", json={"tokens": tokens}).raise_for_status()
    memory = client.get("/v1/sessions/a/memory").json()
    parts = memory["bytes_by_part"]
    assert memory["checkpoints"] == [128, 256, 384]
    assert 0 < memory["cells"] * memory["cell_bytes"] <= parts["cells"]
    assert sum(parts.values()) == memory["bytes"]
    assert parts["checkpoints"] == 3 * parts["states"] > 0
    assert memory["rewind_evaluates"] == 399 - 384
    assert memory["pin_room"] is None
    client.post("/v1/sessions/a/fork", json={"name": "b"}).raise_for_status()
    forked = client.get("/v1/sessions/b/memory").json()
    assert forked["bytes_shared"] == forked["bytes"], "states are shared as well"


def test_a_session_shows_how_many_cells_can_be_pinned(client: httpx.Client) -> None:
    settings = {"policy": "shift", "max_kv_size": 256, "keep": 4, "discard": 100}
    assert client.post("/v1/sessions", json={"name": "d", **settings}).status_code == 201
    client.post("/v1/sessions/d/feed", json={"tokens": list(range(3, 203))}).raise_for_status()
    assert client.get("/v1/sessions/d/memory").json()["pin_room"] == 256 - 4 - 100
    client.post("/v1/sessions/d/pin", json={"start": 0, "end": 20}).raise_for_status()
    assert client.get("/v1/sessions/d/memory").json()["pin_room"] == 256 - 4 - 100 - 16


def test_a_session_shows_what_its_last_answer_took(client: httpx.Client) -> None:
    assert client.post("/v1/sessions", json={"name": "e", "policy": "full"}).status_code == 201
    assert client.get("/v1/sessions/e/memory").json()["last_answer"] is None
    client.post("/v1/sessions/e/feed", json={"tokens": list(range(3, 53))}).raise_for_status()
    body = {"tokens": [9, 8, 7], "max_tokens": 4, "ignore_eos": True}
    client.post("/v1/sessions/e/generate", json=body).raise_for_status()
    answer = client.get("/v1/sessions/e/memory").json()["last_answer"]
    assert answer.pop("per_second") > 0
    assert answer == {"held": 50, "read": 3, "generated": 4, "ended": "length"}
    for name, at in (("f", None), ("g", 20)):
        fork = {"name": name, **({} if at is None else {"at": at})}
        client.post("/v1/sessions/e/fork", json=fork).raise_for_status()
    forks = [client.get(f"/v1/sessions/{name}/memory").json() for name in "fg"]
    assert (forks[0]["last_answer"]["generated"], forks[0]["last_answer"]["ended"]) == (4, "length")
    assert forks[1]["last_answer"] is None
    client.post("/v1/sessions/f/rewind", json={"count": 1}).raise_for_status()
    assert client.get("/v1/sessions/f/memory").json()["last_answer"] is None  # it lacks its end


def test_why_a_prompt_was_not_reused_names_the_missing_checkpoint(client: httpx.Client) -> None:
    assert client.post("/v1/sessions", json={"name": "c"}).status_code == 201
    tokens = [i % 900 + 5 for i in range(1300)]
    client.post("/v1/sessions/c/feed", json={"tokens": tokens}).raise_for_status()
    ends = client.get("/v1/sessions/c/memory").json()["checkpoints"]
    missing = next(end for end in range(256, 1280, 128) if end not in ends)
    prompt = {"tokens": [*tokens[: missing + 20], 7, 7, 7]}
    explained = client.post("/v1/prefix/explain", json=prompt).json()
    assert (explained["reason"], explained["differs_at"]) == ("no_checkpoint", missing + 20)
    assert explained["reused"] == max(end for end in ends if end < missing)
