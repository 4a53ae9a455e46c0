"""Servers over one store: a session goes on at any of them, and is written at one at a time."""

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


def ok(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


def said(
    client: httpx.Client, name: str, headers: dict[str, str] | None = None, **more: Any
) -> Any:
    body = {"max_tokens": 8, "ignore_eos": True, **more}
    return ok(client.post(f"/v1/sessions/{name}/generate", json=body, headers=headers or {}))


def alone(model: Model, *calls: dict[str, Any]) -> list[list[int]]:
    """What one session writes that nobody moves."""
    session, found = model.session(max_kv_size=512, prefill_step=128), []
    from kvkeep import Sampling

    for call in calls:
        if call.get("text"):
            session.feed(model.text.encode(call["text"]))
        sampling = Sampling(temperature=call.get("temperature", 0.0), seed=call.get("seed", 0))
        before = len(session.tokens)
        list(session.stream(call.get("max_tokens", 8), sampling, ignore_eos=True))
        found.append(list(session.tokens)[before:])
    return found


def test_a_session_goes_on_at_another_server_to_the_bit(
    a: httpx.Client, b: httpx.Client, smollm2: Model
) -> None:
    entry = ok(a.post("/v1/sessions", json={"name": "s", "max_kv_size": 512}), 201)
    assert entry["name"] == "s"
    calls = [{"text": STORY}, {}, {"text": " And then"}, {}]
    wanted = alone(smollm2, *calls)
    turns = zip((a, b, a, b), calls, strict=True)
    found = [said(client, "s", **call)["tokens"] for client, call in turns]
    assert found == wanted
    assert ok(a.get("/v1/sessions/s"))["revision"] == ok(b.get("/v1/sessions/s"))["revision"]
    assert [entry["name"] for entry in ok(b.get("/v1/sessions"))["data"]] == ["s"]


def test_edits_forks_and_names_go_with_it(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY, "span": "story"}))
    assert "story" in ok(b.get("/v1/sessions/s"))["spans"]
    ok(b.post("/v1/sessions/s/edit", json={"op": "delete", "span": "story"}))
    assert ok(a.get("/v1/sessions/s"))["tokens"] == 0
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY}))
    ok(b.post("/v1/sessions/s/fork", json={"name": "t"}), 201)
    assert said(a, "t")["tokens"] == said(b, "s")["tokens"]
    ok(a.delete("/v1/sessions/s"))
    assert b.get("/v1/sessions/s").status_code == 404
    assert b.post("/v1/sessions/s/generate", json={}).status_code == 404
    assert [entry["name"] for entry in ok(b.get("/v1/sessions"))["data"]] == ["t"]
    ok(b.post("/v1/sessions", json={"name": "s"}), 201)
    assert a.post("/v1/sessions", json={"name": "s"}).status_code == 400


def test_a_turn_of_a_chat_streams_and_its_end_is_told_when_it_is_committed(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"content": "Name a colour.", "max_tokens": 6, "stream": True}
    with a.stream("POST", "/v1/sessions/s/turns", json=body) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("event")]
        assert events[-1] == "event: done"
    head = SharedSessions(objects).objects_of("s").head()
    assert head is not None
    assert (head.head.gen, head.head.writer) == (2, "")
    assert ok(b.get("/v1/sessions/s"))["tokens"] > 6


def test_a_request_with_a_key_is_carried_out_once(
    a: httpx.Client, b: httpx.Client, smollm2: Model
) -> None:
    key = {"Idempotency-Key": "k1"}
    made = ok(a.post("/v1/sessions", json={"name": "s"}, headers=key), 201)
    assert ok(b.post("/v1/sessions", json={"name": "s"}, headers=key), 201) == made
    asked = {"text": STORY, "temperature": 1.0}
    first = said(a, "s", {"Idempotency-Key": "k2"}, **asked)
    assert said(b, "s", {"Idempotency-Key": "k2"}, **asked) == first
    assert said(a, "s", {"Idempotency-Key": "k2"}, **asked) == first
    second = said(b, "s", {"Idempotency-Key": "k3"}, temperature=1.0)
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


def test_a_client_that_goes_away_without_a_key_leaves_what_was_written(
    a: httpx.Client, b: httpx.Client
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"text": STORY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with a.stream("POST", "/v1/sessions/s/generate", json=body) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > 20:
                break
    tokens = _settled(b, "s")
    assert 15 < tokens < 300


def test_a_client_that_goes_away_with_a_key_can_come_again(
    a: httpx.Client, b: httpx.Client, smollm2: Model
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    key, body = {"Idempotency-Key": "k"}, {"text": STORY, "max_tokens": 60, "ignore_eos": True}
    with a.stream(
        "POST", "/v1/sessions/s/generate", json={**body, "stream": True}, headers=key
    ) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > 20:
                break
    found = said(b, "s", key, **{**body, "stream": False})
    assert [found["tokens"]] == alone(smollm2, body)


def test_a_session_is_busy_at_the_other_server(a: httpx.Client, replicas: Replicas) -> None:
    b = replicas("b", lease=0.3).client()  # it waits as long as one with such leases might be dead
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"text": STORY, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with a.stream("POST", "/v1/sessions/s/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        own = a.post("/v1/sessions/s/generate", json={})
        assert (own.status_code, own.json()["error"]["code"]) == (409, "session_busy")
        other = b.post("/v1/sessions/s/generate", json={})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "held")
        assert other.json()["error"]["writer"] == "a"
        assert int(other.headers["retry-after"]) >= 1
        assert ok(b.get("/v1/sessions/s"))["tokens"] == 0  # as it was committed last
    _settled(b, "s")


def test_who_lost_a_session_stops_at_once_and_says_so(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    """Another writer takes the session by force, as if this server's clock had stood still."""
    from kvkeep.storage.sessions import protocol

    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    body = {"text": STORY, "max_tokens": 480, "ignore_eos": True, "stream": True}
    sessions = SharedSessions(objects, writer="thief")
    events: list[str] = []
    with a.stream("POST", "/v1/sessions/s/generate", json=body) as answer:
        lines = answer.iter_lines()
        while not next(lines).startswith("event: token"):
            pass
        at = sessions.objects_of("s")
        at.run(protocol.acquire(protocol.LeaseRequest("thief", time.time() + 1000, 0.0)))
        events = [line for line in lines if line]
    assert events[-2] == "event: error"
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "moved"
    assert "thief has taken it" in error["message"]
    assert sum(line == "event: token" for line in events) < 400
    assert ok(b.get("/v1/sessions/s"))["tokens"] == 0
    lost = a.post("/v1/sessions/s/generate", json={"text": STORY, "max_tokens": 1})
    assert lost.status_code in (200, 409)


def _settled(client: httpx.Client, name: str) -> int:
    """Tokens of a session once it is committed."""
    for _ in range(600):
        tokens = int(ok(client.get(f"/v1/sessions/{name}"))["tokens"])
        if tokens:
            return tokens
        time.sleep(0.1)
    raise AssertionError("never committed")


def test_two_clients_at_two_servers_never_share_a_generation(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    told: list[int] = []

    def asks(client: httpx.Client, tries: int) -> None:
        for _ in range(tries):
            answer = client.post("/v1/sessions/s/feed", json={"text": " and"})
            if answer.status_code == 200:
                told.append(answer.json()["revision"])
            else:
                assert answer.status_code == 409, answer.text

    threads = [threading.Thread(target=asks, args=(client, 15)) for client in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == len(set(told)) > 10
    assert ok(a.get("/v1/sessions/s"))["tokens"] == len(told)
    head = SharedSessions(objects).objects_of("s").head()
    assert head is not None
    assert head.head.gen == len(told) + 1


def test_reads_at_once_of_a_session_that_is_not_here_yet(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    said(a, "s", text=STORY)
    paths = ("", "/memory", "/text", "/heads", "/memory", "/text")
    with ThreadPoolExecutor(len(paths)) as pool:
        found = list(pool.map(lambda path: b.get(f"/v1/sessions/s{path}").status_code, paths))
    assert found == [200] * len(paths)


def test_a_session_that_was_begun_and_never_committed_can_be_begun_again(
    a: httpx.Client, objects: ObjectStore
) -> None:
    lease = SharedSessions(objects, writer="killed", lease=0.3).begin("s")
    lease._over.set()  # as if it had been killed: nothing is renewed, nothing is let go
    early = a.post("/v1/sessions", json={"name": "s"})
    assert (early.status_code, early.json()["error"]["code"]) == (409, "held")
    assert a.get("/v1/sessions/s").status_code == 404
    time.sleep(0.4)
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    assert said(a, "s", text=STORY)["tokens"]


def test_a_session_without_a_name_is_made_once_for_a_key(a: httpx.Client, b: httpx.Client) -> None:
    key = {"Idempotency-Key": "nameless"}
    made = ok(a.post("/v1/sessions", json={}, headers=key), 201)
    assert ok(b.post("/v1/sessions", json={}, headers=key), 201) == made
    assert len(ok(a.get("/v1/sessions"))["data"]) == 1


def test_what_is_a_servers_own_stays_so(a: httpx.Client) -> None:
    body = {"model": "any", "input": "Say hello.", "max_output_tokens": 4}
    made = ok(a.post("/v1/responses", json=body))
    for _ in range(2):
        a.get(f"/v1/sessions/{made['id']}")
        assert ok(a.get(f"/v1/responses/{made['id']}"))["id"] == made["id"]
    for name in ("slot-1", "resp_mine"):
        assert a.post("/v1/sessions", json={"name": name}).status_code == 400


def test_paths_that_only_look_like_a_sessions(a: httpx.Client, objects: ObjectStore) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    before = SharedSessions(objects).objects_of("s").head()
    for path in ("/v1/sessions/s/feed%0A", "/v1/sessions%0A", "/v1/sessions/a%2Fb/feed"):
        assert a.post(path, json={"text": "x", "name": "t"}).status_code == 404
    a.options("/v1/sessions/s/feed")
    assert a.post("/v1/sessions/s/unheard", json={}).status_code == 404
    assert a.get("/v1/sessions/t").status_code == 404
    after = SharedSessions(objects).objects_of("s").head()
    assert before is not None
    assert after is not None
    assert after.head.gen == before.head.gen


def test_a_session_that_cannot_be_read_can_be_deleted(
    a: httpx.Client, b: httpx.Client, objects: ObjectStore
) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    (stored,) = [each for each in objects.list_objects("sessions/") if each.key.endswith(".kvkeep")]
    objects.put(stored.key, b"damaged")
    assert b.get("/v1/sessions/s").status_code == 500
    assert b.delete("/v1/sessions/s", headers={"If-Match": '"7"'}).status_code == 412
    ok(b.delete("/v1/sessions/s"))
    ok(b.post("/v1/sessions", json={"name": "s"}), 201)


def test_a_turn_that_is_refused_leaves_no_trace(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    long = {"content": "Hello.", "system": "word " * 2000, "max_tokens": 2}
    assert a.post("/v1/sessions/s/turns", json=long).status_code == 400
    asked = {"content": "Name a colour.", "max_tokens": 4}
    texts = []
    for name, client in (("s", a), ("t", b)):
        if name == "t":
            ok(client.post("/v1/sessions", json={"name": name}), 201)
        texts.append(ok(client.post(f"/v1/sessions/{name}/turns", json=asked))["tokens"])
    assert texts[0] == texts[1]


def test_an_edit_is_told_by_revision_at_every_server(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    ok(a.post("/v1/sessions/s/feed", json={"text": STORY}))
    entry = ok(b.get("/v1/sessions/s"))
    stale = {"If-Match": f'"{entry["revision"] - 1}"'}
    for method, what, body in (
        ("POST", "/rewind", {"count": 1}),
        ("POST", "/fork", {"name": "fork"}),
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


def test_snapshots_are_every_servers(a: httpx.Client, b: httpx.Client) -> None:
    ok(a.post("/v1/sessions", json={"name": "s"}), 201)
    said(a, "s", text=STORY)
    ok(a.post("/v1/sessions/s/snapshot", json={"name": "then"}), 201)
    wanted = said(a, "s")["tokens"]
    assert [each["name"] for each in ok(b.get("/v1/snapshots"))["data"]] == ["then"]
    ok(b.post("/v1/snapshots/then/restore", json={"name": "again"}), 201)
    assert said(a, "again")["tokens"] == wanted
    ok(a.delete("/v1/snapshots/then"))
    assert ok(b.get("/v1/snapshots"))["data"] == []
