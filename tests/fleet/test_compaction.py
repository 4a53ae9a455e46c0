"""Compaction of sessions that several servers share, and the handles of compacted conversations."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fleet.conftest import Replica
from server.test_response_compaction import agent_items, ask, compact, evaluated

Replicas = Callable[..., Replica]
LONG = "The harbour of the old town has seen many ships come and go. " * 9
QUESTION = {"role": "user", "content": "What is the gate code?"}


@pytest.fixture
def servers(replicas: Replicas) -> list[httpx.Client]:
    """Two servers whose sessions have policy full, and that compact at 0.6 of 512 cells."""
    running = [replicas(name, policy="full") for name in "ab"]
    for each in running:
        each.service.compact_at = 0.6
    return [each.client() for each in running]


def ok(response: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_turns_compact_a_session_at_any_server_once(servers: list[httpx.Client]) -> None:
    a, b = servers
    ok(a.post("/v1/sessions", json={"name": "talk"}), 201)
    turn = {"content": LONG, "max_tokens": 4}
    ok(a.post("/v1/sessions/talk/turns", json=turn))
    ok(b.post("/v1/sessions/talk/fork", json={"name": "before"}), 201)
    key, reports = {"Idempotency-Key": "k"}, []
    for number, client in enumerate((b, a, b)):
        answer = ok(
            client.post("/v1/sessions/talk/turns", json=turn, headers=key if number else {})
        )
        reports.append(answer.get("compaction"))
    assert all(reports)
    assert reports[1] == reports[2]  # the same key: the response of before
    sessions = [ok(client.get("/v1/sessions/talk")) for client in servers]
    assert sessions[0]["revision"] == sessions[1]["revision"]
    assert sessions[0]["cells"] == sessions[1]["cells"] <= 512
    fork = ok(a.get("/v1/sessions/before"))
    assert fork["cells"] == fork["tokens"]
    wanted = {"target": 150}
    first, again = (
        ok(client.post("/v1/sessions/talk/compact", json=wanted, headers={"Idempotency-Key": "c"}))
        for client in servers
    )
    assert first == again
    assert first["cells"] <= 150


def test_a_session_is_aligned_at_any_server_once(servers: list[httpx.Client]) -> None:
    a, b = servers
    ok(a.post("/v1/sessions", json={"name": "prompt"}), 201)
    ok(a.post("/v1/sessions/prompt/feed", json={"text": f"Monday. {LONG}"}))
    wanted, key = {"text": f"A Friday. {LONG}", "min_saved": 50}, {"Idempotency-Key": "k"}
    path = "/v1/sessions/prompt/align"
    first, again = (ok(client.post(path, json=wanted, headers=key)) for client in (b, a))
    assert first == again
    assert (first["result"]["mode"], first["result"]["seams"]) == ("in_place", 1)
    for client in servers:
        assert ok(client.get("/v1/sessions/prompt"))["revision"] == first["revision"]
        report = ok(client.post("/v1/prefix/explain", json={"text": wanted["text"]}))
        assert (report["reused"], report["reason"]) == (0, "edited")
        in_place = {"text": f"My Friday. {LONG}", "alignment": {"mode": "in_place", "min_saved": 9}}
        report = ok(client.post("/v1/prefix/explain", json=in_place))
        assert (report["reuse"], report["session"]) == ("in_place", "prompt")
    assert a.post(path, json=wanted, headers={"If-Match": '"1"'}).status_code == 412


def test_a_compacted_conversation_goes_on_at_another_server(
    servers: list[httpx.Client], replicas: Replicas
) -> None:
    a, b = servers
    items = agent_items(3)
    key = {"Idempotency-Key": "k"}
    body = {"model": "x", "input": items}
    result = ok(a.post("/v1/responses/compact", json=body, headers=key))
    assert ok(a.post("/v1/responses/compact", json=body, headers=key)) == result
    names = replicas("b").engine.snapshots("0").names()
    assert len(names) == 1
    assert ok(b.get("/v1/snapshots"))["data"] == []  # it is no snapshot of the client
    answers = [ask(client, [*result["output"], QUESTION]) for client in (b, a)]
    assert evaluated(answers[0]) < 60
    assert answers[0]["output"][0]["content"] == answers[1]["output"][0]["content"]
    assert compact(b, input=[*result["output"], QUESTION])["output"][-1]["type"] == "compaction"
    ok(b.delete(f"/v1/snapshots/{names[0]}"))
    a.delete(f"/v1/sessions/{names[0]}")
    assert ask(b, [*result["output"], QUESTION])["output"]  # from its text
    assert b.post("/v1/sessions", json={"name": names[0]}).status_code == 400
