"""Session affinity: routes a request to the server that has its session or prefix in memory.

Ray's proxies run this before their router, whose consistent hashing sends requests of one
`x-session-id` to one server. A request without that header gets one: a session's name, or a hash of
the beginning of the chat or prompt. It only saves time: any server can answer any request.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from blake3 import blake3
from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from kvkeep.chat.prompt_rules import without_billing_header
from kvkeep.fleet.session_target import SESSIONS_PATH, session_target
from kvkeep.server.idempotency import replay
from kvkeep.server.limits import parse_json
from kvkeep.storage.sessions.interface import is_valid_name

_ID_HEADER = b"x-session-id"
MIDDLEWARES_IMPORT_PATH = f"{__name__}:middlewares"
_OPENAI_PATHS = ("/chat/completions", "/completions", "/responses")
_V1_OPENAI_PATHS = tuple(f"/v1{path}" for path in _OPENAI_PATHS)
# For POST requests to these, the session id is computed from the body.
_BODY_ID_PATHS = {
    *(*_OPENAI_PATHS, *_V1_OPENAI_PATHS, "/completion", "/v1/messages", SESSIONS_PATH),
    *("/api/chat", "/api/generate", "/v1/prefix/explain"),
}
_MAX_BODY_BYTES = 1 << 20  # requests with larger bodies get no header
_BODY_SECONDS = 30.0  # requests whose bodies take longer get no header
_MAX_INLINE_BYTES = 1 << 16  # larger bodies are parsed in a thread
_MAX_PREFIX_TOKENS, _MAX_PREFIX_CHARACTERS = 256, 1024  # of a prompt; the rest is not hashed


class Affinity:
    """ASGI middleware in Ray's proxy that adds the `x-session-id` header."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(name == _ID_HEADER for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        session_id = session_target(scope["method"], scope["path"]).name
        if not session_id and scope["method"] == "POST" and scope["path"] in _BODY_ID_PATHS:
            body_messages = await _receive_body(receive)
            receive = replay(body_messages, receive)
            body = b"".join(message.get("body", b"") for message in body_messages)
            compute_id = partial(affinity_session_id, scope["path"], body, _credentials(scope))
            if len(body) <= _MAX_INLINE_BYTES:
                session_id = compute_id()
            elif len(body) <= _MAX_BODY_BYTES:
                session_id = await asyncio.to_thread(compute_id)
        if session_id:
            scope = {**scope, "headers": [*scope["headers"], (_ID_HEADER, session_id.encode())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Any]:
    """Return the middlewares for Ray's RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(Affinity)]


def affinity_session_id(path: str, body: bytes, credentials: bytes = b"") -> str:
    """Return a POST request's session id: a session's name, or a hash of a prompt; "" for neither.

    With a `prompt_cache_key` it is a hash of that alone. credentials: of the client, hashed too, so
    that clients with equal prompts have different ids.
    """
    try:
        return _session_id(path, parse_json(body), credentials)
    except (ValueError, RecursionError):  # the server reports it
        return ""


def _session_id(path: str, request: Any, credentials: bytes) -> str:
    """Return the id of `affinity_session_id`. Raises RecursionError for much nesting."""
    if not isinstance(request, dict):
        return ""
    if path == SESSIONS_PATH:
        name = request.get("name")
        return name if isinstance(name, str) and is_valid_name(name) else ""
    cache_key = request.get("prompt_cache_key")
    has_key = isinstance(cache_key, str) and bool(cache_key)
    prefix = [cache_key] if has_key else _stable_prefix(request)
    if not prefix:
        return ""
    prefix_json = json.dumps(_without_changing_parts(prefix), sort_keys=True).encode()
    return blake3(prefix_json, key=blake3(credentials).digest()).hexdigest()[:32]


def _stable_prefix(request: dict[str, Any]) -> list[Any]:
    """Return the part of a prompt that all turns of a chat share: up to the first user message.

    Where alignment in place is asked for, all before the text of that message may change.
    """
    names = ("messages", "input", "prompt", "text", "tokens")
    turns = next((request[name] for name in names if request.get(name) is not None), None)
    if _is_in_place(request) and (text := _first_user_text(turns)):
        return [text]
    preamble = [request[name] for name in ("system", "instructions", "tools") if name in request]
    is_plain = turns is not None and not {"messages", "input"} & request.keys()
    if isinstance(turns, str):
        if is_plain:
            return [*preamble, turns[:_MAX_PREFIX_CHARACTERS]]
        return [*preamble, {"role": "user", "content": turns}]
    if not isinstance(turns, Sequence):
        return []
    if is_plain:  # token ids, or several prompts
        return [*preamble, *turns[:_MAX_PREFIX_TOKENS]]
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role") == "user":
            return [*preamble, *turns[: index + 1]]
    return [*preamble, *turns]


def _is_in_place(request: dict[str, Any]) -> bool:
    alignment = request.get("alignment")
    return (alignment.get("mode") if isinstance(alignment, dict) else alignment) == "in_place"


def _first_user_text(turns: Any) -> str:
    """Return the last text of the first user message: clients put reminders before it."""
    messages = turns if isinstance(turns, list) else []
    users = (turn for turn in messages if isinstance(turn, dict) and turn.get("role") == "user")
    content = next(users, {}).get("content", "")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = next((text for text in reversed(texts) if text), "")
    return content if isinstance(content, str) else ""


def _without_changing_parts(value: Any) -> Any:
    """Drop what clients change from turn to turn: `cache_control` marks and billing headers."""
    if isinstance(value, str):
        return without_billing_header(value)
    if isinstance(value, dict):
        items = value.items()
        return {key: _without_changing_parts(v) for key, v in items if key != "cache_control"}
    return [_without_changing_parts(item) for item in value] if isinstance(value, list) else value


def _credentials(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return headers.get(b"authorization") or headers.get(b"x-api-key") or b""


async def _receive_body(receive: Receive) -> list[Message]:
    """Return the ASGI messages of the body, until it ends, is too long or takes too long."""
    body_messages, size, more_body = list[Message](), 0, True
    with suppress(TimeoutError):  # the server refuses it by its own limits, first for want of a key
        async with asyncio.timeout(_BODY_SECONDS):
            while more_body and size <= _MAX_BODY_BYTES:
                message = await receive()
                body_messages.append(message)
                size += len(message.get("body", b""))
                more_body = message.get("more_body", False)
    return body_messages
