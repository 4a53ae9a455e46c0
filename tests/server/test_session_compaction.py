"""Compaction over HTTP: by request, before a turn, and Anthropic's context edits."""

from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from kvkeep.model import Model
from tests.server.conftest import RunningServer, ScriptedServer, running_server

SIZE = 512
LONG = "The harbour of the old town has seen many ships come and go. " * 9


@pytest.fixture(scope="module")
def full_server(
    smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server whose sessions hold 512 cells, and that compacts at 0.6 of them."""
    folder = tmp_path_factory.mktemp("compaction")
    with running_server(
        smollm2, folder, settings={"max_kv_size": SIZE, "policy": "full"}
    ) as running:
        running.service.compact_at = 0.6
        yield running


def test_turns_compact_their_session_and_a_fork_of_before_is_intact(
    full_server: RunningServer,
) -> None:
    with full_server.client() as client:
        assert client.post("/v1/sessions", json={"name": "talk"}).status_code == 201
        reports = []
        for number in range(4):
            if number == 1:
                client.post("/v1/sessions/talk/fork", json={"name": "before"})
            turn = {"content": f"{LONG} Number {number}?", "max_tokens": 4}
            response = client.post("/v1/sessions/talk/turns", json=turn)
            body = response.json()
            assert response.status_code == 200, body
            session = client.get("/v1/sessions/talk").json()
            assert session["cells"] <= SIZE
            if "compaction" in body:
                reports.append(body["compaction"])
                assert "compacted:" in response.headers["X-Kvkeep-Warning"]
        assert len(reports) >= 2
        assert all(report["cells_after"] <= SIZE // 2 for report in reports)
        fork = client.get("/v1/sessions/before").json()
        assert fork["cells"] == fork["tokens"]
        operations = client.get("/v1/operations").json()["data"]
        assert "compact" in [operation["what"] for operation in operations]


def test_a_turn_is_refused_if_another_client_changes_the_session_after_its_compaction(
    full_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = full_server.service.engine
    run_in_steps = engine.run_in_steps

    def change_twice(function: Any) -> Any:
        result = run_in_steps(function)
        wait([result])  # a long change refuses others until it ends
        engine.change("race", "0", "rewind", lambda session: session.rewind(1))
        return result

    with full_server.client() as client:
        client.post("/v1/sessions", json={"name": "race"})
        revision = client.post("/v1/sessions/race/feed", json={"text": LONG * 2}).json()["revision"]
        monkeypatch.setattr(engine, "run_in_steps", change_twice)
        turn, headers = {"content": "Why?", "max_tokens": 2}, {"If-Match": f'"{revision}"'}
        response = client.post("/v1/sessions/race/turns", json=turn, headers=headers)
        assert response.status_code == 412, response.text


@pytest.mark.parametrize(
    "refused",
    [
        {"content": "Why?", "logit_bias": {"9999999": 1}},
        {"content": "Why?", "system": "Another one."},
        {"content": LONG * 8},
    ],
    ids=["bias", "system", "size"],
)
def test_a_turn_that_is_refused_compacts_nothing(
    full_server: RunningServer, refused: dict[str, Any]
) -> None:
    with full_server.client() as client:
        created = client.post("/v1/sessions", json={}).json()
        path = f"/v1/sessions/{created['name']}"
        before = client.post(f"{path}/feed", json={"text": LONG * 2}).json()
        response = client.post(f"{path}/turns", json={"max_tokens": 2, **refused})
        assert response.status_code in (400, 413), response.text
        after = client.get(path).json()
    assert [after[field] for field in ("revision", "tokens", "cells")] == [
        before[field] for field in ("revision", "total_tokens", "total_tokens")
    ]


def test_a_turn_after_a_compaction_that_changes_nothing_has_the_revision_of_before(
    full_server: RunningServer,
) -> None:
    with full_server.client() as client:
        client.post("/v1/sessions", json={"name": "pinned"})
        client.post("/v1/sessions/pinned/feed", json={"text": LONG * 2})
        count = client.get("/v1/sessions/pinned").json()["tokens"]
        span = {"name": "system", "start": 0, "end": count}
        named = client.post("/v1/sessions/pinned/spans", json=span)
        turn = {"content": "Why?", "max_tokens": 2}
        headers = {"If-Match": f'"{named.json()["revision"]}"'}
        response = client.post("/v1/sessions/pinned/turns", json=turn, headers=headers)
        assert response.status_code == 200, response.text
        report = response.json()["compaction"]
        assert report["cells_before"] == report["cells_after"] == count


def test_a_session_is_compacted_by_request_once(full_server: RunningServer) -> None:
    with full_server.client() as client:
        client.post("/v1/sessions", json={"name": "agent"})
        for number in range(1, 4):
            feed = {"text": LONG[:400], "span": f"tool result {number}"}
            client.post("/v1/sessions/agent/feed", json=feed)
        wanted = {"target": 250, "keep_results": 1, "steps": ["results"]}
        outdated = client.post(
            "/v1/sessions/agent/compact", json=wanted, headers={"If-Match": '"1"'}
        )
        assert outdated.status_code == 412
        key = {"Idempotency-Key": "compact once"}
        first, repeated = (
            client.post("/v1/sessions/agent/compact", json=wanted, headers=key).json()
            for _ in range(2)
        )
        assert repeated == first
        assert client.get("/v1/sessions/agent").json()["revision"] == first["revision"]
        assert first["result"]["removed_results"] == ["tool result 1"]
        assert first["cells"] == first["result"]["cells_after"] <= 250
        again = client.post("/v1/sessions/agent/compact", json=wanted).json()
        assert again["result"]["removed_results"] == []
        assert again["cells"] == first["cells"]


@pytest.mark.parametrize("body", [{"target": 0}, {"steps": ["all"]}, {"keep_recent": -1}])
def test_bad_requests_are_refused(full_server: RunningServer, body: dict[str, Any]) -> None:
    with full_server.client() as client:
        client.post("/v1/sessions", json={"name": "bad"})
        client.post("/v1/sessions/bad/feed", json={"text": "Some text."})
        assert client.post("/v1/sessions/bad/compact", json=body).status_code == 400
        assert client.post("/v1/sessions/none/compact", json={}).status_code == 404


def tool_history() -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read the files."}]
    for number in range(4):
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": {"n": number}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": LONG[:200]}
        messages += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    return messages


def test_context_edits_shorten_the_prompt_and_are_reported(scripted: ScriptedServer) -> None:
    scripted.write("Done.")
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": 1},
    }
    body: dict[str, Any] = {"max_tokens": 20, "messages": tool_history()}
    edited = {**body, "context_management": {"edits": [edit]}}
    with scripted.client() as client:
        plain = client.post("/v1/messages", json=body).json()
        assert "context_management" not in plain
        answer = client.post("/v1/messages", json=edited).json()
        (applied,) = answer["context_management"]["applied_edits"]
        assert applied["cleared_tool_uses"] == 3
        tokens = [
            sum(m["usage"][f"{k}_tokens"] for k in ("input", "cache_read_input"))
            for m in (plain, answer)
        ]
        assert tokens[0] - tokens[1] == applied["cleared_input_tokens"] > 50
        count = client.post("/v1/messages/count_tokens", json=edited).json()
        assert count["input_tokens"] == tokens[1]
        assert count["context_management"] == {"original_input_tokens": tokens[0]}
        stream = client.post("/v1/messages", json={**edited, "stream": True}).text
        assert '"cleared_tool_uses":3' in stream.replace(" ", "")
        unknown = {**body, "context_management": {"edits": [{"type": "clear_new_20990101"}]}}
        response = client.post("/v1/messages", json=unknown)
        assert response.json()["context_management"] == {"applied_edits": []}
        assert "clear_new_20990101" in response.headers["X-Kvkeep-Ignored"]
        bad = {**body, "context_management": {"edits": [{"type": 7}]}}
        assert client.post("/v1/messages", json=bad).status_code == 400
