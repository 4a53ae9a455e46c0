"""Servers over one store: any of them continues a session, one at a time writes it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fleet.conftest import Replica

from kvkeep.model import Model
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.shared import SharedSessions

Replicas = Callable[..., Replica]
STORY = "Once upon a time there was a small town by the sea, in which"


@pytest.fixture
def a(replicas: Replicas) -> Iterator[httpx.Client]:
    with replicas("a").client() as client:
        yield client


@pytest.fixture
def b(replicas: Replicas) -> Iterator[httpx.Client]:
    with replicas("b").client() as client:
        yield client


def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def generate(
    client: httpx.Client, name: str, headers: dict[str, str] | None = None, **fields: Any
) -> Any:
    body = {"max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}
    return ok(client.post(f"/v1/sessions/{name}/generate", json=body, headers=headers or {}))


def generate_locally(model: Model, *calls: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of the same calls on one local session."""
    session, result = model.session(max_kv_size=512, prefill_step=128), []
    from kvkeep import Sampling

    for call in calls:
        if call.get("text"):
            session.feed(model.text.encode(call["text"]))
        sampling = Sampling(temperature=call.get("temperature", 0.0), seed=call.get("seed", 0))
        before = len(session.tokens)
        list(session.stream(call.get("max_tokens", 8), sampling, ignore_eos=True))
        result.append(list(session.tokens)[before:])
    return result


def test_a_session_continues_at_another_server_to_the_bit(
    a: httpx.Client, b: httpx.Client, smollm2: Model
) -> None:
    entry = ok(a.post("/v1/sessions", json={"name": "s", "max_kv_size": 512}), 201)
    assert entry["name"] == "s"
    calls = [{"text": STORY}, {}, {"text": " And then"}, {}]
    expected = generate_locally(smollm2, *calls)
    turns = zip((a, b, a, b), calls, strict=True)
    result = [generate(client, "s", **call)["tokens"] for client, call in turns]
    assert result == expected
    assert ok(a.get("/v1/sessions/s"))["revision"] == ok(b.get("/v1/sessions/s"))["revision"]
    assert [entry["name"] for entry in ok(b.get("/v1/sessions"))["data"]] == ["s"]


def test_edits_forks_and_spans_are_visible_at_every_server(
    a: httpx.Client, b: httpx.Client
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY, "span": "story"}))
    assert "story" in ok(b.get("/v1/sessions/s"))["spans"]
    ok(b.post("/v1/sessions/s/edit", json={"op": "delete", "span": "story"}))
    assert ok(a.get("/v1/sessions/s"))["tokens"] == 0
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY}))
    ok(b.post("/v1/sessions/s/fork", json={"name": "t"}), 201)
    ok(a.post("/v1/sessions/s/fork", json={"name": "u"}), 201)
    assert generate(a, "t")["tokens"] == generate(b, "u")["tokens"]
    ok(a.delete("/v1/sessions/u"))
    ok(a.delete("/v1/sessions/s"))
    assert b.get("/v1/sessions/s").status_code == 404
    assert b.post("/v1/sessions/s/generate", json={}).status_code == 404
    assert [entry["name"] for entry in ok(b.get("/v1/sessions"))["data"]] == ["t"]
    ok(b.post("/v1/sessions", json={"name": "s"}), 201)
    assert a.post("/v1/sessions", json={"name": "s"}).status_code == 400


def test_a_streamed_turn_ends_only_once_it_is_committed(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"content": "Name a colour.", "max_tokens": 6, "stream": True}
    with a.stream("POST", "/v1/sessions/s/turns", json=body) as response:
        events = [line for line in response.iter_lines() if line.startswith("event")]
        assert events[-1] == "event: done"
    head = SharedSessions(objects).objects_of("s").head()
    assert head is not None
    assert (head.head.gen, head.head.writer) == (2, "")
    assert ok(b.get("/v1/sessions/s"))["tokens"] > 6


def test_a_request_with_a_key_runs_once_at_any_server(
    a: httpx.Client, b: httpx.Client, smollm2: Model
) -> None:
    key = {"Idempotency-Key": "k1"}
    created = ok(a.post("/v1/sessions", json={"name": "s"}, headers=key), 201)
    assert ok(b.post("/v1/sessions", json={"name": "s"}, headers=key), 201) == created
    params = {"text": STORY, "temperature": 1.0}
    first = generate(a, "s", {"Idempotency-Key": "k2"}, **params)
    assert generate(b, "s", {"Idempotency-Key": "k2"}, **params) == first
    assert generate(a, "s", {"Idempotency-Key": "k2"}, **params) == first
    second = generate(b, "s", {"Idempotency-Key": "k3"}, temperature=1.0)
    assert second["tokens"] != first["tokens"]
    other = b.post("/v1/sessions/s/generate", json={}, headers={"Idempotency-Key": "k3"})
    assert other.status_code == 400
    assert other.json()["error"]["code"] == "key_reused"
    streamed = {"max_tokens": 5, "stream": True}
    texts = [
        client.post("/v1/sessions/s/generate", json=streamed, headers={"Idempotency-Key": "k4"})
        for client in (a, b)
    ]
    assert texts[0].text == texts[1].text
    assert texts[1].headers["content-type"].startswith("text/event-stream")


def test_a_deletion_with_a_key_is_made_once(a: httpx.Client, b: httpx.Client) -> None:
    key = {"Idempotency-Key": "k1"}
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    deleted = ok(a.delete("/v1/sessions/s", headers=key))
    assert ok(b.delete("/v1/sessions/s", headers=key)) == deleted
    for headers in ({"Idempotency-Key": "k2"}, {}):
        assert b.delete("/v1/sessions/s", headers=headers).status_code == 404
    ok(b.post("/v1/sessions", json={"name": "s"}), 201)
    assert ok(a.delete("/v1/sessions/s", headers=key)) == deleted  # delayed on its way
    ok(a.post("/v1/sessions/s/snapshot", json={"name": "then"}), 201)
    deleted = ok(a.delete("/v1/snapshots/then", headers=key))
    assert ok(a.delete("/v1/snapshots/then", headers=key)) == deleted
    assert a.delete("/v1/snapshots/then").status_code in (400, 404)
    ok(a.delete("/v1/sessions/s", headers={"Idempotency-Key": "k3"}))
    assert b.get("/v1/sessions/s").status_code == 404


def test_disconnecting_without_a_key_keeps_the_sampled_tokens(
    a: httpx.Client, b: httpx.Client
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"text": STORY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with a.stream("POST", "/v1/sessions/s/generate", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > 20:
                break
    tokens = _tokens_once_committed(b, "s")
    assert 15 < tokens < 300


def test_disconnecting_with_a_key_rolls_back_and_a_retry_runs_whole(
    a: httpx.Client, b: httpx.Client, smollm2: Model
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    key = {"Idempotency-Key": "k"}
    body = {"text": STORY, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with a.stream(
        "POST", "/v1/sessions/s/generate", json={**body, "stream": True}, headers=key
    ) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > 20:
                break
    result = generate(b, "s", key, **{**body, "stream": False})
    assert [result["tokens"]] == generate_locally(smollm2, body)


def test_a_session_that_is_written_is_held_for_other_servers(
    a: httpx.Client, replicas: Replicas
) -> None:
    b = replicas("b", lease=0.3).client()  # short leases: b gives up waiting soon
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"text": STORY, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with a.stream("POST", "/v1/sessions/s/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        own = a.post("/v1/sessions/s/generate", json={})
        assert (own.status_code, own.json()["error"]["code"]) == (409, "session_busy")
        other = b.post("/v1/sessions/s/generate", json={})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "held")
        assert other.json()["error"]["writer"] == "a"
        assert int(other.headers["retry-after"]) >= 1
        assert ok(b.get("/v1/sessions/s"))["tokens"] == 0  # as last committed
    _tokens_once_committed(b, "s")


def test_losing_the_lease_ends_the_generation_with_an_error(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    """Another writer takes the lease by force, as if this server's clock had stopped."""
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"text": STORY, "max_tokens": 480, "ignore_eos": True, "stream": True}
    sessions = SharedSessions(objects, writer="thief")
    events: list[str] = []
    with a.stream("POST", "/v1/sessions/s/generate", json=body) as response:
        lines = response.iter_lines()
        while not next(lines).startswith("event: token"):
            pass
        at = sessions.objects_of("s")
        at.run(protocol.acquire(protocol.LeaseRequest("thief", time.time() + 1000, 0.0)))
        events = [line for line in lines if line]
    assert events[-2] == "event: error"
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "moved"
    assert "thief has acquired it" in error["message"]
    assert sum(line == "event: token" for line in events) < 400
    assert ok(b.get("/v1/sessions/s"))["tokens"] == 0
    lost = a.post("/v1/sessions/s/generate", json={"text": STORY, "max_tokens": 1})
    assert lost.status_code in (200, 409)


def _tokens_once_committed(client: httpx.Client, name: str) -> int:
    """Wait for a commit and return the number of tokens."""
    for _ in range(600):
        tokens = int(ok(client.get(f"/v1/sessions/{name}"))["tokens"])
        if tokens:
            return tokens
        time.sleep(0.1)
    raise AssertionError("never committed")


def test_concurrent_writes_at_two_servers_never_share_a_revision(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    revisions: list[int] = []

    def feed_repeatedly(client: httpx.Client, tries: int) -> None:
        for _ in range(tries):
            response = client.post("/v1/sessions/s/feed", json={"text": " and"})
            if response.status_code == 200:
                revisions.append(response.json()["revision"])
            else:
                assert response.status_code == 409, response.text

    threads = [threading.Thread(target=feed_repeatedly, args=(client, 15)) for client in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(revisions) == len(set(revisions)) > 10
    assert ok(a.get("/v1/sessions/s"))["tokens"] == len(revisions)
    head = SharedSessions(objects).objects_of("s").head()
    assert head is not None
    assert head.head.gen == len(revisions) + 1


def test_concurrent_reads_load_a_session_once(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    generate(a, "s", text=STORY)
    paths = ("", "/memory", "/text", "/heads", "/memory", "/text")
    with ThreadPoolExecutor(len(paths)) as pool:
        result = list(pool.map(lambda path: b.get(f"/v1/sessions/s{path}").status_code, paths))
    assert result == [200] * len(paths)


def test_a_session_whose_creation_was_killed_can_be_created_again(
    a: httpx.Client, objects: ObjectStore
) -> None:
    # As by a server that was killed: the lease is neither renewed nor released.
    request = protocol.LeaseRequest("killed", time.time(), 0.3)
    SharedSessions(objects).objects_of("s").run(protocol.create(request))
    early = a.post("/v1/sessions", json={"name": "s"})
    assert (early.status_code, early.json()["error"]["code"]) == (409, "held")
    assert a.get("/v1/sessions/s").status_code == 404
    time.sleep(0.4)
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    assert generate(a, "s", text=STORY)["tokens"]


def test_an_unnamed_session_is_created_once_for_a_key(a: httpx.Client, b: httpx.Client) -> None:
    key = {"Idempotency-Key": "nameless"}
    created = ok(a.post("/v1/sessions", json={}, headers=key), 201)
    assert ok(b.post("/v1/sessions", json={}, headers=key), 201) == created
    assert len(ok(a.get("/v1/sessions"))["data"]) == 1


def test_responses_and_slots_are_local_to_a_server(a: httpx.Client) -> None:
    body = {"model": "any", "input": "Say hello.", "max_output_tokens": 4}
    created = ok(a.post("/v1/responses", json=body))
    for _ in range(2):
        a.get(f"/v1/sessions/{created['id']}")
        assert ok(a.get(f"/v1/responses/{created['id']}"))["id"] == created["id"]
    more = {"alignment": "in_place", "previous_response_id": created["id"]}
    aligned = ok(a.post("/v1/responses", json={**body, **more}))
    assert "256 or more" in aligned["x_kvkeep"]["not_in_place"]
    for name in ("slot-1", "resp_mine"):
        assert a.post("/v1/sessions", json={"name": name}).status_code == 400


def test_paths_that_resemble_a_session_change_nothing(
    a: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    before = SharedSessions(objects).objects_of("s").head()
    for path in ("/v1/sessions/s/feed%0A", "/v1/sessions%0A", "/v1/sessions/a%2Fb/feed"):
        assert a.post(path, json={"text": "x", "name": "t"}).status_code == 404
    a.options("/v1/sessions/s/feed")
    assert a.post("/v1/sessions/s/unheard", json={}).status_code == 404
    for path in ("/spans", "/fork", "/events", "/unheard", "%2Fold"):
        assert a.delete(f"/v1/sessions/s{path}").status_code in (404, 405), path
    assert a.get("/v1/sessions/t").status_code == 404
    after = SharedSessions(objects).objects_of("s").head()
    assert before is not None
    assert after is not None
    assert after.head.gen == before.head.gen


def test_a_damaged_session_can_be_deleted(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    (stored,) = [item for item in objects.list_objects("sessions/") if item.key.endswith(".kvkeep")]
    objects.put(stored.key, b"damaged")
    assert b.get("/v1/sessions/s").status_code == 500
    assert b.delete("/v1/sessions/s", headers={"If-Match": '"7"'}).status_code == 412
    ok(b.delete("/v1/sessions/s"))
    ok(b.post("/v1/sessions", json={"name": "s"}), 201)


def test_a_refused_turn_changes_nothing(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    long = {"content": "Hello.", "system": "word " * 2000, "max_tokens": 2}
    assert a.post("/v1/sessions/s/turns", json=long).status_code == 400
    params = {"content": "Name a colour.", "max_tokens": 4, "temperature": 0}
    texts = []
    for name, client in (("s", a), ("t", b)):
        if name == "t":
            ok(client.post("/v1/sessions", json={"name": name}), 201)
        texts.append(ok(client.post(f"/v1/sessions/{name}/turns", json=params))["tokens"])
    assert texts[0] == texts[1]


def test_if_match_is_checked_at_every_server(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY}))
    entry = ok(b.get("/v1/sessions/s"))
    stale = {"If-Match": f'"{entry["revision"] - 1}"'}
    for method, what, body in (
        ("POST", "/rewind", {"count": 1}),
        ("POST", "/fork", {"name": "fork"}),
        ("POST", "/revert", {"to": "another"}),
        ("POST", "/save", None),
        ("POST", "/snapshot", {"name": "then"}),
        ("PUT", "/resident", {"resident": True}),
        ("DELETE", "", None),
    ):
        refused = b.request(method, f"/v1/sessions/s{what}", json=body, headers=stale)
        assert refused.status_code == 412, (what, refused.text)
    assert ok(b.get("/v1/snapshots"))["data"] == []
    right = {"If-Match": f'"{entry["revision"]}"'}
    ok(b.post("/v1/sessions/s/rewind", json={"count": 1}, headers=right))
    assert ok(a.get("/v1/sessions/s"))["tokens"] == entry["tokens"] - 1


def test_a_session_is_reverted_at_another_server(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY}))
    fork = ok(a.post("/v1/sessions/s/fork", json={"name": "before"}), 201)
    revision = ok(a.post("/v1/sessions/s/rewind", json={"count": 3}))["revision"]
    key = {"Idempotency-Key": "k"}
    assert b.post("/v1/sessions/s/revert", json={"to": "missing"}).status_code == 404
    assert b.post("/v1/sessions/s/revert", json={"to": "s"}).status_code == 400
    reverted = ok(b.post("/v1/sessions/s/revert", json={"to": "before"}, headers=key))
    assert (reverted["tokens"], reverted["revision"]) == (fork["tokens"], revision + 1)
    ok(b.delete("/v1/sessions/before"))
    assert ok(a.post("/v1/sessions/s/revert", json={"to": "before"}, headers=key)) == reverted
    assert ok(a.get("/v1/sessions/s"))["revision"] == revision + 1


def test_snapshots_are_shared_by_all_servers(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    generate(a, "s", text=STORY)
    ok(a.post("/v1/sessions/s/snapshot", json={"name": "then"}), 201)
    expected = generate(a, "s")["tokens"]
    assert [item["name"] for item in ok(b.get("/v1/snapshots"))["data"]] == ["then"]
    ok(b.post("/v1/snapshots/then/restore", json={"name": "again"}), 201)
    assert generate(a, "again")["tokens"] == expected
    ok(a.delete("/v1/snapshots/then"))
    missing = b.post("/v1/snapshots/then/restore", json={"name": "never"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "snapshot_not_found")
    assert ok(b.get("/v1/snapshots"))["data"] == []


def test_sessions_of_the_command_line_are_listed_with_those_of_servers(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore, smollm2: Model
) -> None:
    """A snapshot of the command line has none of an engine's notes."""
    session = smollm2.session(max_kv_size=512)
    session.feed(smollm2.text.encode(STORY))
    snapshot = session.snapshot()
    with SharedSessions(objects).lock("cli") as path:
        snapshot.save(path)
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    entries = {entry["name"]: entry for entry in ok(b.get("/v1/sessions"))["data"]}
    assert set(entries) == {"cli", "s"}
    assert entries["cli"]["created"] == int(snapshot.created)
    assert generate(b, "cli")["tokens"]
