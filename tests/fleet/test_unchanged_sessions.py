"""Requests that change nothing: the server keeps its copy of the session, and uploads nothing."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fleet.conftest import Replica

from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.sessions.shared import SharedSessions

STORY = "Once upon a time there was a small town by the sea, in which"
KEY = {"Idempotency-Key": "key"}
# As (method, path, body, headers, status).
REFUSED = {
    "unknown field": ("POST", "/feed", {"texts": "a"}, {}, 400),
    "unknown span": ("POST", "/edit", {"op": "delete", "span": "none"}, {}, 400),
    "stale revision": ("POST", "/feed", {"text": "a"}, {"If-Match": '"0"'}, 412),
    "with a key": ("POST", "/edit", {"op": "delete", "span": "none"}, KEY, 400),
}
WITHOUT_EFFECT = {
    "stop": ("POST", "/stop", None, {}, 200),
    "compact": ("POST", "/compact", {"target": 500}, {}, 200),
    "same title": ("PUT", "/title", {"title": "Tale"}, {}, 200),
    "same resident": ("PUT", "/resident", {"resident": False}, {}, 200),
    "stop with a key": ("POST", "/stop", None, KEY, 200),
    "compact with a key": ("POST", "/compact", {"target": 500}, KEY, 200),
}
CASES = REFUSED | WITHOUT_EFFECT


@pytest.fixture
def a(replicas: Callable[..., Replica]) -> Replica:
    """A server with session "s" in its memory."""
    server = replicas("a")
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "s", "title": "Tale"}).raise_for_status()
        client.post("/v1/sessions/s/feed", json={"text": STORY}).raise_for_status()
    return server


def _send(server: Replica, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
    with server.client(**headers) as client:
        return client.request(method, f"/v1/sessions/s{path}", json=body)


def _head(objects: ObjectStore) -> tuple[int, str]:
    head = SharedSessions(objects).objects_of("s").head()
    assert head is not None
    return head.head.gen, head.head.snapshot


@pytest.mark.parametrize("case", CASES)
def test_the_copy_of_the_session_stays_and_nothing_is_uploaded(
    a: Replica, objects: ObjectStore, case: str
) -> None:
    method, path, body, headers, status = CASES[case]
    (record,), head = a.engine.sessions().result(), _head(objects)
    assert _send(a, method, path, body, headers).status_code == status
    assert _head(objects) == head
    assert a.engine.sessions().result() == [record]
    assert not record.removed
    with a.client() as client:  # it can be changed next, at the revision that it had
        fed = client.post("/v1/sessions/s/feed", json={"text": " and then"})
    assert fed.json()["revision"] == record.revision
    assert _head(objects)[0] == head[0] + 1


def test_a_request_with_a_key_that_changes_nothing_runs_once(
    a: Replica, replicas: Callable[..., Replica]
) -> None:
    first, other = ("POST", "/compact", {"target": 500}), ("POST", "/compact", {"target": 400})
    response = _send(a, *first, KEY).json()
    assert _send(a, *first, KEY).json() == response
    assert _send(a, *other, KEY).json()["error"]["code"] == "key_reused"
    _send(a, "POST", "/feed", {"text": " and then"}, {}).raise_for_status()
    # That commit has stored the response, so that another server repeats it.
    assert _send(replicas("b"), *first, KEY).json() == response


def test_a_response_reports_the_revision_that_its_commit_has_saved(a: Replica) -> None:
    with a.client() as client:
        responses: list[httpx.Response] = [
            client.post("/v1/sessions", json={"name": "t"}),
            client.post("/v1/sessions/s/edit", json={"op": "delete", "start": 3, "end": 5}),
            client.post("/v1/sessions/s/fork", json={"name": "u"}),
            client.put("/v1/sessions/u/title", json={"title": "Ünder"}, headers=KEY),
            client.put("/v1/sessions/u/title", json={"title": "Ünder"}, headers=KEY),
        ]
        stored = client.get("/v1/sessions/u").json()
    for response in responses:
        entry = response.json()
        assert entry["saved_revision"] == entry["revision"], response.request.url
    assert stored == responses[-1].json()
