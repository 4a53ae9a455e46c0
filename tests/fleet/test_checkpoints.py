"""Servers over one store with models whose tokens overwrite local windows and states."""

import asyncio
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from edit_actions import loud_model
from engine.workload import Request
from fleet.conftest import replica
from small_models import local_spec, small_model, state_specs

from kvkeep.engine import Engine, Limits
from kvkeep.fleet.replica import Replica
from kvkeep.model import Model
from kvkeep.storage.objects import open_object_store

MODELS = {
    "local": loud_model(local_spec(window=60)),
    "delta_net": small_model(spec=state_specs()["delta_net"]),
}
SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": 2048}


def text(count: int, seed: int = 7) -> tuple[int, ...]:
    return tuple((i * i * seed + 3 * i) % 250 + 1 for i in range(count))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def ok(response: httpx.Response) -> Any:
    assert response.is_success, response.text
    return response.json()


def test_a_session_goes_back_at_another_server_as_it_would_at_the_first(
    model: Model, tmp_path: Path
) -> None:
    """Each call goes to another server, and must do what one session in one process does."""
    objects = open_object_store((tmp_path / "store").as_uri())
    alone = model.session(2048, policy="full", prefill_step=128)
    with ExitStack() as stack:
        running = [stack.enter_context(replica(model, objects, name)) for name in "ab"]
        a, b = (stack.enter_context(each.client()) for each in running)
        ok(a.post("/v1/sessions", json={"name": "s", **SETTINGS}))
        ok(b.post("/v1/sessions/s/feed", json={"tokens": text(700)}))
        alone.feed(text(700))
        assert ok(a.get("/v1/sessions/s/memory"))["checkpoints"] == alone.checkpoints
        for client, count in ((a, 3), (b, 250), (a, 1)):
            ok(client.post("/v1/sessions/s/rewind", json={"count": count}))
            alone.rewind(count)
            other, body = (b if client is a else a), {"max_tokens": 5, "ignore_eos": True}
            generated = ok(other.post("/v1/sessions/s/generate", json={**body, "temperature": 0}))
            assert generated["tokens"] == [alone.next_token() for _ in range(5)]
        memory = ok(b.get("/v1/sessions/s/memory"))
        assert memory["checkpoints"] == alone.checkpoints
        assert memory["rewind_evaluates"] == alone.memory_use.rewind_evaluates


def test_a_prompt_reuses_a_session_that_was_moved(model: Model, tmp_path: Path) -> None:
    objects = open_object_store((tmp_path / "store").as_uri())
    with ExitStack() as stack:
        running = [stack.enter_context(replica(model, objects, name)) for name in "ab"]
        a, b = (stack.enter_context(each.client()) for each in running)
        ok(a.post("/v1/sessions", json={"name": "s"}))
        ok(a.post("/v1/sessions/s/feed", json={"tokens": text(400)}))
        ok(b.get("/v1/sessions/s/memory"))
        request = Request((*text(300), 9, 9, 9), 5)
        (result,) = request.do(running[1].engine) or ()
    assert (result.reuse.tokens, result.reuse.session) == (256, "s")
    with Engine(model, settings={"max_kv_size": 512}) as fresh:
        assert result.same((request.do(fresh) or ())[0])


def test_a_new_server_continues_from_the_prompts_of_the_others(
    model: Model, tmp_path: Path
) -> None:
    secret, url = secrets.token_bytes(32), (tmp_path / "store").as_uri()
    requests = [
        Request(text(1000), 4),
        Request(text(1000), 4),
        Request((*text(700), *text(200, 11)), 4),
        Request((*text(1000), *text(400, 13)), 4),
    ]
    counts = []
    for request in requests:  # each at a server that has just been started
        server = Replica(
            model,
            url,
            secret,
            settings=SETTINGS,
            limits=Limits(memory=500_000_000),
            share_prefixes=True,
        )
        (result,) = request.do(server.engine) or ()
        asyncio.run(server.close())
        counts.append(result.reuse.tokens)
        with Engine(model, settings=SETTINGS) as fresh:
            assert result.same((request.do(fresh) or ())[0])
    assert counts == [0, 768, 512, 768]
