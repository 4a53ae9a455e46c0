"""Large bodies: they are validated in a thread, with the same result as small ones."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import model_validator
from server.conftest import RunningServer
from starlette.testclient import TestClient

from kvkeep.server.body_route import MAX_BYTES_AT_ONCE, body_router
from kvkeep.server.schemas import RequestBody

PADDING = "x" * MAX_BYTES_AT_ONCE
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def test_other_requests_are_answered_while_a_large_body_is_validated() -> None:
    reached, released = threading.Event(), threading.Event()

    class WaitingBody(RequestBody):
        text: str
        was_released: bool = False

        @model_validator(mode="after")
        def wait(self) -> "WaitingBody":
            reached.set()
            self.was_released = released.wait(20)
            return self

    app, router = FastAPI(), body_router()

    @router.post("/large")
    async def large(body: WaitingBody) -> dict[str, Any]:
        return {"released": body.was_released, "length": len(body.text)}

    @router.get("/release")
    async def release() -> None:
        released.set()

    app.include_router(router)
    responses: list[dict[str, Any]] = []
    with TestClient(app) as client:

        def post() -> None:
            responses.append(client.post("/large", json={"text": PADDING}).json())

        thread = threading.Thread(target=post)
        thread.start()
        assert reached.wait(60)
        assert client.get("/release").status_code == 200
        thread.join()
    assert responses == [{"released": True, "length": len(PADDING)}]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"temperature": "hot"}, 400),
        ({"temperature": -1}, 400),
        ({"messages": None}, 400),
        ({"stop": ["\ud800"]}, 400),
        ({"x": {"\ud800": 1}}, 400),
        ({"x": [1e308, float("inf")]}, 400),
    ],
)
def test_a_large_body_has_the_response_of_a_small_one(
    client: httpx.Client, fields: dict[str, Any], status: int
) -> None:
    body = {"messages": USER, "max_tokens": 1, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    small, large = (
        client.post("/v1/chat/completions", content=json.dumps(content), headers=headers)
        for content in (body, {**body, "metadata": {"a": PADDING}})
    )
    assert small.status_code == large.status_code == status, large.text
    if status == 400:
        assert small.json() == large.json()
    else:
        assert small.json()["choices"] == large.json()["choices"]


@pytest.mark.parametrize("content", [b"{", b'{"a": \xff}', b"[" * 50_000])
def test_a_large_body_that_is_no_json_is_refused(client: httpx.Client, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for padding in (b"", b" " * MAX_BYTES_AT_ONCE):
        response = client.post("/v1/chat/completions", content=padding + content, headers=headers)
        assert response.status_code == 400, response.text
