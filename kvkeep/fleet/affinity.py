"""Which server a request goes to whose client does not say: one that knows what it is about.

Ray's proxies run this in front of their router, which sends requests of one `x-session-id` to one
server. A request without that header is given one: of a session its name, and of a chat or a prompt
a hash of how it begins. So the turns of a conversation come to the server that has its beginning in
memory. It is a matter of speed alone: any server answers any request.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from kvkeep.fleet.responses import Message, Receive, Send
from kvkeep.fleet.session_target import about
from kvkeep.storage.sessions.names import is_name

HEADER = b"x-session-id"
CALLBACK = f"{__name__}:middlewares"
_SESSIONS = "/v1/sessions"
_OPENAI = ("/chat/completions", "/completions", "/responses")
_ASKING = frozenset(
    (*_OPENAI, *(f"/v1{path}" for path in _OPENAI), "/completion", "/v1/messages", _SESSIONS)
)
_MOST = 1 << 20  # bytes of a body that is looked into
_AT_ONCE = 1 << 16  # bytes that are looked into while nothing else goes on
_TOKENS, _CHARACTERS = 256, 1024  # of a prompt without turns


class Affinity:
    """An ASGI application around Ray's proxy."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(name == HEADER for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        key = about(scope["method"], scope["path"]).name
        if not key and scope["method"] == "POST" and scope["path"] in _ASKING:
            taken = await _taken(receive)
            receive = _again(taken, receive)
            key = await _key(scope, b"".join(message.get("body", b"") for message in taken))
        if key:
            scope = {**scope, "headers": [*scope["headers"], (HEADER, key.encode())]}
        await self._app(scope, receive, send)


async def _key(scope: dict[str, Any], body: bytes) -> str:
    if len(body) > _MOST:
        return ""
    if len(body) <= _AT_ONCE:
        return key_of(scope["path"], body, _who(scope))
    return await asyncio.to_thread(key_of, scope["path"], body, _who(scope))


def middlewares() -> list[Any]:
    """As Ray asks for them (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    from starlette.middleware import Middleware

    return [Middleware(Affinity)]


def key_of(path: str, body: bytes, who: bytes = b"") -> str:
    """Of a request by POST; '' where nothing can be told. who: asks. Others have other keys."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):  # whoever answers will say so
        return ""
    if not isinstance(asked, dict):
        return ""
    if path == _SESSIONS:
        name = asked.get("name")
        return name if isinstance(name, str) and is_name(name) else ""
    begins = _beginning(asked)
    if not begins:
        return ""
    text = json.dumps(_plain(begins), sort_keys=True).encode()
    return blake3(text, key=blake3(who).digest()).hexdigest()[:32]


def _beginning(asked: dict[str, Any]) -> list[Any]:
    """Everything that stays in place as a conversation grows: to its user's first words."""
    turns = asked.get("messages", asked.get("input", asked.get("prompt")))
    before = [asked[name] for name in ("system", "instructions", "tools") if name in asked]
    if isinstance(turns, str):
        if "prompt" in asked:
            return [*before, turns[:_CHARACTERS]]
        return [*before, {"role": "user", "content": turns}]
    if not isinstance(turns, Sequence):
        return []
    if "prompt" in asked:  # tokens, or several prompts
        return [*before, *turns[:_TOKENS]]
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role") == "user":
            return [*before, *turns[: number + 1]]
    return [*before, *turns]


def _plain(value: Any) -> Any:
    """Without the marks by which Anthropic's clients say from turn to turn what to keep."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name != "cache_control"}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _who(scope: dict[str, Any]) -> bytes:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return headers.get(b"authorization") or headers.get(b"x-api-key") or b""


async def _taken(receive: Receive) -> list[Message]:
    """What comes until the body ends, or is larger than what is looked into."""
    taken, size, more = list[Message](), 0, True
    while more and size <= _MOST:
        message = await receive()
        taken.append(message)
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    return taken


def _again(taken: list[Message], receive: Receive) -> Receive:
    """Gives that once more, and then what comes after it."""
    left = iter(taken)

    async def gives() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return gives
