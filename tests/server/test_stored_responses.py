"""Stored responses are bounded in number and bytes, apart from the sessions of users."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import running_server

from kvkeep.engine import Limits
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.model import Model
from tests.scripted_model import model_with_text_of

SETTINGS = {"max_kv_size": 512}


@pytest.fixture(scope="module")
def small(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_with_text_of(tmp_path_factory.mktemp("model"), smollm2.text.folder)


@contextmanager
def client_of(model: Model, folder: Path, **limits: int) -> Iterator[httpx.Client]:
    """Serve a model, and yield a client. limits: of the engine; only these are small."""
    with running_server(
        model, folder, limits=Limits(save_idle_after=0.05, **limits), settings=SETTINGS
    ) as server:
        yield server.client()


def respond(client: httpx.Client, text: Any, **fields: Any) -> dict[str, Any]:
    body = {"input": text, "max_output_tokens": 4, "temperature": 0, **fields}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def names(client: httpx.Client) -> set[str]:
    return set(in_order_of_use(client))


def status(client: httpx.Client, response: dict[str, Any]) -> int:
    return client.get(f"/v1/responses/{response['id']}").status_code


def in_order_of_use(client: httpx.Client) -> list[str]:
    """Return the names of all sessions, the last used first."""
    return [entry["name"] for entry in client.get("/v1/sessions").json()["data"]]


def num_tokens(client: httpx.Client, response: dict[str, Any]) -> int:
    return int(client.get(f"/v1/sessions/{response['id']}/text").json()["total"])


def await_saved(client: httpx.Client) -> None:
    def is_saved(entry: dict[str, Any]) -> bool:
        return bool(entry["saved_revision"] == entry["revision"])

    while not all(map(is_saved, client.get("/v1/sessions").json()["data"])):
        time.sleep(0.02)


def test_the_least_recently_used_responses_are_dropped(small: Model, tmp_path: Path) -> None:
    """One that was read or continued counts as used. After a restart, as of the last saves."""
    with client_of(small, tmp_path, responses_per_owner=3) as client:
        stored = [respond(client, f"Question {number}") for number in range(3)]
        await_saved(client)
        assert status(client, stored[0]) == 200
        stored.append(respond(client, "And?", previous_response_id=stored[2]["id"]))
        await_saved(client)
        assert [status(client, response) for response in stored] == [200, 404, 200, 200]
    assert len(list(tmp_path.rglob("resp_*.kvkeep"))) == 3
    with client_of(small, tmp_path, responses_per_owner=3) as client:
        stored.append(respond(client, "And?", previous_response_id=stored[3]["id"]))
        assert names(client) == {stored[number]["id"] for number in (2, 3, 4)}


def test_responses_and_sessions_have_limits_of_their_own(small: Model, tmp_path: Path) -> None:
    limits = {"responses_per_owner": 2, "sessions_per_owner": 2}
    with client_of(small, tmp_path, **limits) as client:
        stored = [respond(client, f"Question {number}") for number in range(4)]
        for name in ("a", "b"):
            assert client.post("/v1/sessions", json={"name": name}).status_code == 201
        refused = client.post("/v1/sessions", json={"name": "c"})
        assert "the limit of 2 sessions is reached" in refused.text
        stored.append(respond(client, "And?", previous_response_id=stored[3]["id"]))
        assert names(client) == {"a", "b", stored[3]["id"], stored[4]["id"]}


def test_pinned_and_resident_responses_stay(small: Model, tmp_path: Path) -> None:
    with client_of(small, tmp_path, responses_per_owner=1) as client:
        pinned = respond(client, "Pinned", prompt_cache_retention="24h")
        resident = respond(client, "Resident")
        client.put(f"/v1/sessions/{resident['id']}/resident", json={"resident": True})
        dropped, last = respond(client, "Dropped"), respond(client, "Last")
        stored = (pinned, resident, dropped, last)
        assert [status(client, response) for response in stored] == [200, 200, 404, 200]
        assert client.get("/v1/prefix/pins").json()["data"]


def test_cells_beyond_the_memory_limit_are_dropped_and_the_text_stays(
    small: Model, tmp_path: Path
) -> None:
    """A response without cells is found, is continued by its text, and loses nothing more."""
    memory = 2 * max_session_bytes(small.session(**SETTINGS), None)
    texts = [f"{number} " + "one two three four " * 80 for number in range(8)]
    with client_of(small, tmp_path, memory=memory) as client:
        stored = [respond(client, text) for text in texts]
        await_saved(client)
        first, last = stored[0], stored[-1]
        assert sum(path.stat().st_size for path in tmp_path.rglob("resp_*.kvkeep")) < 1.5 * memory
        assert [num_tokens(client, response) for response in (first, last)] == [
            0,
            last["usage"]["total_tokens"],
        ]
    with client_of(small, tmp_path, memory=memory) as client:
        assert in_order_of_use(client) == [response["id"] for response in reversed(stored)]
        for response in stored:
            assert client.get(f"/v1/responses/{response['id']}").json() == response
        history = client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        question = {"role": "user", "content": "And?"}
        expected = respond(client, [*history, *first["output"], question])
        after = respond(client, "And?", previous_response_id=first["id"])
        assert after["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
        assert num_tokens(client, after) == after["usage"]["total_tokens"]
        assert len(names(client)) == len(stored) + 2


@pytest.mark.parametrize("prefix", ["resp_", "cmp_"])
def test_names_of_responses_and_compactions_are_not_for_other_sessions(
    small: Model, tmp_path: Path, prefix: str
) -> None:
    name = {"name": prefix + "0" * 24}
    with client_of(small, tmp_path) as client:
        client.post("/v1/sessions", json={"name": "a"})
        client.post("/v1/sessions/a/snapshot", json={"name": "label"})
        for path, body in (
            ("/v1/sessions", name),
            ("/v1/sessions", {**name, "from_snapshot": "label"}),
            ("/v1/sessions/a/fork", name),
            ("/v1/snapshots/label/restore", name),
        ):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
            assert "is reserved" in refused.text
        assert names(client) == {"a"}
        for near in (prefix + "0" * 23, prefix + "notes"):
            assert client.post("/v1/sessions", json={"name": near}).status_code == 201


def test_a_fork_of_a_response_may_take_its_place(small: Model, tmp_path: Path) -> None:
    """The undo of the web UI puts a fork in the place of its session."""
    with client_of(small, tmp_path) as client:
        stored = respond(client, "Question")
        client.post(f"/v1/sessions/{stored['id']}/fork", json={"name": "before"})
        client.delete(f"/v1/sessions/{stored['id']}")
        again = client.post("/v1/sessions/before/fork", json={"name": stored["id"]})
        assert again.status_code == 201, again.text
        assert client.get(f"/v1/responses/{stored['id']}").json() == stored
