"""Requests without a session header are keyed by their session or prefix."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from kvkeep.fleet import affinity
from kvkeep.fleet.affinity import Affinity, affinity_session_id

CHAT = "/v1/chat/completions"


def user_message(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def key_for(path: str, credentials: bytes = b"", **body: Any) -> str:
    return affinity_session_id(path, json.dumps(body).encode(), credentials)


def test_turns_of_a_conversation_have_one_key() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = key_for(CHAT, messages=[system, user_message("one")])
    answered = {"role": "assistant", "content": "1"}
    assert first
    assert (
        key_for(
            CHAT, messages=[system, user_message("one"), answered, user_message("two")], stream=True
        )
        == first
    )
    assert key_for(CHAT, messages=[system, user_message("another")]) != first
    assert key_for(CHAT, messages=[user_message("one")]) != first
    assert key_for(CHAT, b"Bearer another", messages=[system, user_message("one")]) != first


def test_every_kind_of_prompt_is_keyed_by_its_prefix() -> None:
    text = "x" * 1024
    assert key_for("/v1/completions", prompt=text) == key_for("/v1/completions", prompt=text + "y")
    assert key_for("/v1/completions", prompt=text) != key_for("/v1/completions", prompt="y" + text)
    tokens = list(range(256))
    assert key_for("/v1/completions", prompt=tokens) == key_for(
        "/v1/completions", prompt=[*tokens, 1]
    )
    messages = [user_message("one")]
    assert key_for("/v1/messages", messages=messages) != key_for(
        "/v1/messages", system="s", messages=messages
    )
    assert key_for("/v1/responses", input="one") != key_for("/v1/responses", input="two")
    answered = {"role": "assistant", "content": "1"}
    assert key_for("/responses", input="one") == key_for(
        "/responses", input=[user_message("one"), answered]
    )
    billed, other_billed = (
        [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"}]
        for cch in ("36ee5", "0aaa9")
    )
    messages = [user_message("one")]
    assert key_for("/v1/messages", system=billed, messages=messages) == key_for(
        "/v1/messages", system=other_billed, messages=messages
    )
    stored = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    moved = [user_message([{"type": "text", "text": "one"}]), answered, user_message([stored])]
    assert key_for("/v1/messages", messages=[user_message([stored])]) == key_for(
        "/v1/messages", messages=moved
    )


def test_prompts_that_are_aligned_in_place_are_keyed_by_what_does_not_change() -> None:
    def session_id(day: str, texts: list[str], alignment: Any = None, **more: Any) -> str:
        system = {"role": "system", "content": f"Today is {day}."}
        parts = [{"type": "text", "text": text} for text in texts]
        fields = {"alignment": alignment} if alignment else {}
        return key_for(CHAT, messages=[system, user_message(parts)], **fields, **more)

    first = session_id("Monday", ["a reminder", "Write a game."], "in_place", tools=[{}])
    assert session_id("Friday", ["Write a game."], {"mode": "in_place", "reread": 3}) == first
    assert session_id("Friday", ["Write a poem."], "in_place") != first
    assert session_id("Monday", ["one"], "exact") != session_id("Friday", ["one"], "exact")
    keyed = session_id("Monday", ["one"], prompt_cache_key="k")
    assert session_id("Friday", ["two"], prompt_cache_key="k") == keyed
    assert session_id("Friday", ["two"], prompt_cache_key="l") != keyed
    explain, messages = "/v1/prefix/explain", [user_message("one")]
    assert key_for(explain, messages=messages) == key_for(CHAT, messages=messages)
    assert key_for(explain, text="one") == key_for("/v1/completions", prompt="one")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"messages": 1}', b"\xff"])
def test_bodies_without_a_prefix_have_no_key(body: bytes) -> None:
    assert affinity_session_id(CHAT, body) == ""
    assert affinity_session_id("/v1/sessions", body) == ""


def forward(
    method: str, path: str, body: bytes, pieces: int = 1, headers: tuple[Any, ...] = ()
) -> tuple[str | None, bytes]:
    """Forward a request through the middleware; return its header and its body."""
    size = -(-len(body) // pieces) or 1
    parts = [body[begin : begin + size] for begin in range(0, len(body), size)] or [b""]
    coming = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]
    result: list[tuple[str | None, bytes]] = []

    async def receive() -> Message:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        whole, fields = b"", True
        while fields:
            message = await receive()
            whole, fields = whole + message["body"], message["more_body"]
        assert (await receive())["type"] == "http.disconnect"
        key = dict(scope["headers"]).get(b"x-session-id")
        result.append((key.decode() if key else None, whole))

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(Affinity(app)(scope, receive, send))
    return result[0]


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_body_is_forwarded_whole_with_a_key(pieces: int) -> None:
    body = json.dumps({"messages": [user_message("one")]}).encode()
    assert forward("POST", CHAT, body, pieces) == (affinity_session_id(CHAT, body), body)
    new = b'{"name": "notes"}'
    assert forward("POST", "/v1/sessions", new, pieces) == ("notes", new)
    turn = b'{"content": "one"}'
    assert forward("POST", "/v1/sessions/notes/turns", turn, pieces) == ("notes", turn)
    assert forward("GET", "/v1/sessions/notes", b"") == ("notes", b"")
    assert forward("GET", "/v1/models", b"") == (None, b"")
    own = ((b"x-session-id", b"mine"),)
    assert forward("POST", CHAT, body, pieces, own) == ("mine", body)


def test_a_large_body_is_forwarded_unparsed() -> None:
    body = json.dumps({"messages": [user_message("x" * (2 << 20))]}).encode()
    assert forward("POST", CHAT, body, pieces=50) == (None, body)


def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server receives the request, which may have no API key, with what follows of its body."""
    monkeypatch.setattr(affinity, "_BODY_SECONDS", 0.1)
    parts = [{"type": "http.request", "body": body, "more_body": True} for body in (b"{", b"}")]
    received = list[Message]()

    async def scenario() -> None:
        forwarded, waiting = asyncio.Event(), [*parts]

        async def receive() -> Message:
            if len(waiting) < len(parts):  # after the first one
                await forwarded.wait()
            return waiting.pop(0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert not scope["headers"]
            forwarded.set()
            received.extend([await receive(), await receive()])

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        async with asyncio.timeout(20):
            await Affinity(app)(scope, receive, None)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert received == parts


@pytest.mark.parametrize("levels", [600, 200_000])
def test_a_body_of_deep_nesting_has_no_id(levels: int) -> None:
    """The server refuses it."""
    nested = "[" * levels + "]" * levels
    body = f'{{"messages": [{{"role": "user", "content": {nested}}}]}}'.encode()
    assert affinity_session_id(CHAT, body) == ""
