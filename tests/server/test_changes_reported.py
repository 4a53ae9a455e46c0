"""The response to a change is of that change, whatever happens to the session right after it."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvkeep.engine import Generation, GenerationRequest, Limits, Operation
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.model import Model
from kvkeep.session.session import Session
from tests.server.conftest import RunningServer, running_server

TEXT = "The harbour of the old town has seen many ships come and go. " * 2
GREEDY = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "feed": ("feed", {"text": "Ships came."}),
    "generate": ("generate", GREEDY),
    "stream": ("generate", {**GREEDY, "stream": True}),
    "turn": ("turns", {"content": "Why?", "max_tokens": 2}),
    "delete": ("edit", {"op": "delete", "start": 3, "end": 5}),
    "evaluated again": ("edit", {"op": "delete", "start": 3, "end": 5, "recompute": "suffix"}),
    "pin": ("pin", {"start": 2, "end": 4}),
    "span": ("spans", {"name": "part", "start": 2, "end": 4}),
    "rewind": ("rewind", {"count": 2}),
    "align": ("align", {"text": "Once. " + TEXT}),
    "title": ("title", {"title": "Ships"}),
}


def _put(session: Session) -> None:
    session.feed("!")


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_reports_its_own_revision_and_not_a_later_one(
    server: RunningServer, kind: str
) -> None:
    """With the revision of a change it has not seen, a client would overwrite it unawares."""
    engine, name = server.service.engine, f"race-{kind.replace(' ', '-')}"
    path, body = CHANGES[kind]
    changed: list[Operation] = []

    def change_again(operation: Operation) -> None:
        if operation.session == name and not changed:
            changed.append(operation)
            engine.change(name, operation.owner, "feed", _put, new_tokens=4)

    with server.client() as client:
        client.post("/v1/sessions", json={"name": name}).raise_for_status()
        before = client.post(f"/v1/sessions/{name}/feed", json={"text": TEXT}).json()["revision"]
        stop = engine.watch(change_again)
        try:
            method = "PUT" if kind == "title" else "POST"
            response = client.request(method, f"/v1/sessions/{name}/{path}", json=body)
        finally:
            stop()
        assert response.status_code == 200, response.text
        if kind == "stream":
            assert f'"revision":{before + 1}' in response.text.replace(" ", "")
        else:
            assert response.json()["revision"] == before + 1
        if "ETag" in response.headers:
            assert response.headers["ETag"] == f'"{before + 1}"'
        assert client.get(f"/v1/sessions/{name}").json()["revision"] == before + 2


def test_a_change_is_reported_although_another_session_took_the_room(
    smollm2: Model, tmp_path: Path
) -> None:
    """It was made: an error would have the client make it twice."""
    settings = {"max_kv_size": 512, "prefill_step": 128}
    ids, local = smollm2.text.encode(TEXT), smollm2.session(**settings)
    other_bytes = max_session_bytes(local, len(ids) + 256)
    local.feed(ids)
    limits = Limits(memory=local.nbytes + other_bytes)
    assert max_session_bytes(local, 0) > local.nbytes
    started: list[Future[list[Generation]]] = []

    with running_server(smollm2, tmp_path, limits=limits, settings=settings) as full:
        engine = full.service.engine

        def take_room(operation: Operation) -> None:
            if operation.what == "generate" and not started:
                request = GenerationRequest(tuple(ids), 256, ignore_eos=True, speculate=False)
                started.append(engine.submit(request, "other", operation.owner))

        with full.client() as client:
            for name in ("one", "other"):
                client.post("/v1/sessions", json={"name": name}).raise_for_status()
            stop = engine.watch(take_room)
            response = client.post("/v1/sessions/one/feed", json={"tokens": ids})
            stop()
            (generation,) = started[0].result()
            assert response.status_code == 200, response.text
            pin = client.post("/v1/sessions/one/pin", json={"start": 2, "end": 4})
            assert pin.status_code == 429  # this one was not made
            assert client.get("/v1/sessions/one/text").json()["revision"] == 1
            generation.cancel()


def test_a_turn_that_repeats_the_system_prompt_needs_no_room_for_it(
    smollm2: Model, tmp_path: Path
) -> None:
    system = "Answer in one short sentence, and say where you know it from. " * 24
    settings = {"max_kv_size": 2048, "prefill_step": 16}
    session = smollm2.session(**settings)
    session.feed(smollm2.text.encode(system))
    most_bytes = max_session_bytes(session, len(session.tokens) // 2)
    with (
        running_server(
            smollm2, tmp_path, limits=Limits(memory=most_bytes), settings=settings
        ) as full,
        full.client() as client,
    ):
        client.post("/v1/sessions", json={"name": "chat"}).raise_for_status()
        turn = {"content": "Hi.", "system": system, "max_tokens": 4, "temperature": 0}
        for _ in range(2):
            response = client.post("/v1/sessions/chat/turns", json=turn)
            assert response.status_code == 200, response.text


def test_a_refused_first_turn_leaves_no_system_prompt(smollm2: Model, tmp_path: Path) -> None:
    settings = {"max_kv_size": 128, "policy": "full"}
    with running_server(smollm2, tmp_path, settings=settings) as full, full.client() as client:
        path = "/v1/sessions/chat"
        client.post("/v1/sessions", json={"name": "chat"}).raise_for_status()
        pirate = {"system": "Answer like a pirate.", "content": "Ships came. " * 80}
        assert client.post(f"{path}/turns", json=pirate).status_code == 400
        turn = {"content": "Hi.", "max_tokens": 2, "temperature": 0}
        client.post(f"{path}/turns", json=turn).raise_for_status()
        assert "pirate" not in str(client.get(f"{path}/text").json()["pieces"])


def test_a_stored_response_waits_for_room_to_be_stored(smollm2: Model, tmp_path: Path) -> None:
    """Its session may be evicted between the answer's end and the note of the response."""
    settings = {"max_kv_size": 512, "prefill_step": 16}
    ids = tuple(smollm2.text.encode(TEXT))
    other_bytes = max_session_bytes(smollm2.session(**settings), len(ids) + 64)
    started: list[Future[list[Generation]]] = []
    limits = Limits(memory=other_bytes + 1)
    with running_server(smollm2, tmp_path, limits=limits, settings=settings) as full:
        engine = full.service.engine

        def take_room(operation: Operation) -> None:
            if operation.what == "generate" and not started:
                request = GenerationRequest(ids, 64, ignore_eos=True, speculate=False)
                started.append(engine.submit(request, None, operation.owner))

        with full.client() as client:
            stop = engine.watch(take_room)
            body = {"input": "Hi.", "max_output_tokens": 2, "temperature": 0}
            response = client.post("/v1/responses", json=body)
            stop()
            assert response.status_code == 200, response.text
            stored = client.get(f"/v1/responses/{response.json()['id']}")
            assert stored.json()["output"] == response.json()["output"]
