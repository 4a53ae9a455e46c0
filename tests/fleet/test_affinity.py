"""Requests that say nothing of a session come to the server that knows what they begin with."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from kvkeep.fleet.affinity import Affinity, affinity_key

CHAT = "/v1/chat/completions"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def of(path: str, who: bytes = b"", **body: Any) -> str:
    return affinity_key(path, json.dumps(body).encode(), who)


def test_the_turns_of_a_conversation_have_one_key() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = of(CHAT, messages=[system, user("one")])
    answered = {"role": "assistant", "content": "1"}
    assert first
    assert of(CHAT, messages=[system, user("one"), answered, user("two")], stream=True) == first
    assert of(CHAT, messages=[system, user("another")]) != first
    assert of(CHAT, messages=[user("one")]) != first
    assert of(CHAT, b"Bearer another", messages=[system, user("one")]) != first


def test_prompts_of_every_kind_have_the_key_of_their_beginning() -> None:
    text = "x" * 1024
    assert of("/v1/completions", prompt=text) == of("/v1/completions", prompt=text + "y")
    assert of("/v1/completions", prompt=text) != of("/v1/completions", prompt="y" + text)
    tokens = list(range(256))
    assert of("/v1/completions", prompt=tokens) == of("/v1/completions", prompt=[*tokens, 1])
    messages = [user("one")]
    assert of("/v1/messages", messages=messages) != of(
        "/v1/messages", system="s", messages=messages
    )
    assert of("/v1/responses", input="one") != of("/v1/responses", input="two")
    answered = {"role": "assistant", "content": "1"}
    assert of("/responses", input="one") == of("/responses", input=[user("one"), answered])
    kept = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    moved = [user([{"type": "text", "text": "one"}]), answered, user([kept])]
    assert of("/v1/messages", messages=[user([kept])]) == of("/v1/messages", messages=moved)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"messages": 1}', b"\xff"])
def test_what_says_nothing_has_no_key(body: bytes) -> None:
    assert affinity_key(CHAT, body) == ""
    assert affinity_key("/v1/sessions", body) == ""


def passed_on(
    method: str, path: str, body: bytes, pieces: int = 1, headers: tuple[Any, ...] = ()
) -> tuple[str | None, bytes]:
    """The header with which a request goes on, and its body."""
    size = -(-len(body) // pieces) or 1
    parts = [body[begin : begin + size] for begin in range(0, len(body), size)] or [b""]
    coming = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]
    found: list[tuple[str | None, bytes]] = []

    async def receive() -> Message:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        whole, more = b"", True
        while more:
            message = await receive()
            whole, more = whole + message["body"], message["more_body"]
        assert (await receive())["type"] == "http.disconnect"
        key = dict(scope["headers"]).get(b"x-session-id")
        found.append((key.decode() if key else None, whole))

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(Affinity(app)(scope, receive, send))
    return found[0]


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_request_goes_on_whole_with_a_key(pieces: int) -> None:
    body = json.dumps({"messages": [user("one")]}).encode()
    assert passed_on("POST", CHAT, body, pieces) == (affinity_key(CHAT, body), body)
    new = b'{"name": "notes"}'
    assert passed_on("POST", "/v1/sessions", new, pieces) == ("notes", new)
    turn = b'{"content": "one"}'
    assert passed_on("POST", "/v1/sessions/notes/turns", turn, pieces) == ("notes", turn)
    assert passed_on("GET", "/v1/sessions/notes", b"") == ("notes", b"")
    assert passed_on("GET", "/v1/models", b"") == (None, b"")
    own = ((b"x-session-id", b"mine"),)
    assert passed_on("POST", CHAT, body, pieces, own) == ("mine", body)


def test_a_large_body_goes_on_without_being_looked_into() -> None:
    body = json.dumps({"messages": [user("x" * (2 << 20))]}).encode()
    assert passed_on("POST", CHAT, body, pieces=50) == (None, body)
