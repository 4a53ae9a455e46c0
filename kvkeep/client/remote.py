"""A session on a server, and the requests that its methods send."""

import json
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from kvkeep.errors import InvalidArgument

Text = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, token ids, or messages
FromJson = Callable[[Any], Any]  # from a response's JSON to a method's result


@dataclass(frozen=True)
class ApiRequest:
    """A request to a server. None values in the body and the parameters are not sent."""

    method: str
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    revision: int | None = None  # the server refuses the request at any other revision
    params: Mapping[str, Any] = field(default_factory=dict)
    # By this key, the server makes a change once even if the request is sent again.
    idempotency_key: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for httpx. Raises InvalidArgument for what JSON lacks."""
        headers = {} if self.method == "GET" else {"Idempotency-Key": self.idempotency_key}
        if self.revision is not None:
            headers["If-Match"] = f'"{self.revision}"'
        payload: dict[str, Any] = {"params": _without_none(self.params)}
        if self.method not in ("GET", "DELETE"):
            headers["Content-Type"] = "application/json"
            payload["content"] = _json_bytes(_without_none(self.body))
        return {"method": self.method, "url": self.path, "headers": headers, **payload}


class ApiClient:
    """The methods of a client that sessions use; synchronous or asynchronous."""

    send: Callable[..., Any]
    stream: Callable[[ApiRequest], Any]


class RemoteSession:
    """A session on a server, by its name. It holds no state: each method sends a request.

    Methods do what those of `Session` do. They return the server's JSON, a dictionary unless stated
    otherwise. With an `AsyncClient`, they are awaited, and streams are iterated by `async for`.

    A method with a `revision` changes the session only if it is at that revision, and otherwise
    raises WrongRevision. All methods raise NoSuchSession; Busy while the session is fed or
    generates, also at another server of a fleet; NoRoom, with `retry_after` in seconds;
    InvalidArgument; and ServerError if the server does not respond.
    """

    def __init__(self, client: ApiClient, name: str):
        self._client, self.name = client, name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def info(self) -> Any:
        """Return revision, bytes, settings and spans, without loading the session from disk."""
        return self._get("")

    def memory(self) -> Any:
        """Return runs of tokens (kept, pinned, window, compressed, forgotten), spans and bytes."""
        return self._get("/memory")

    def text(self, start: int = 0, end: int | None = None) -> Any:
        """Return tokens `start ... end - 1`, each with its text; at most 4,096 of them."""
        return self._get("/text", start=start, end=end)

    def heads(self, layer: int | None = None, head: int | None = None) -> Any:
        """Return the cell counts of layers and KV heads; the positions of one if both are given."""
        return self._get("/heads", layer=layer, head=head)

    def events(self) -> Any:
        """Stream the operations on the session as pairs of a name and its data."""
        return self._client.stream(ApiRequest("GET", self._path("/events")))

    # Feeding and generating

    def feed(self, text: Text, span: str | None = None, revision: int | None = None) -> Any:
        """Append and prefill a text, token ids, or messages. span: a name for their tokens."""
        return self._post("/feed", revision, **text_fields(text), span=span)

    def generate(self, text: Text | None = None, revision: int | None = None, **fields: Any) -> Any:
        """Prefill a text, if any, and generate. fields: max_tokens, temperature, ..."""
        return self._post("/generate", revision, **text_fields(text), **fields)

    def stream(self, text: Text | None = None, revision: int | None = None, **fields: Any) -> Any:
        """Generate, and stream pairs of an event ("read", "token" or "done") and its data."""
        return self._stream("/generate", revision, **text_fields(text), **fields)

    def say(
        self, content: str, system: str | None = None, revision: int | None = None, **fields: Any
    ) -> Any:
        """Send a chat message; return the reply. system: the system prompt, for the first turn."""
        return self._post("/turns", revision, content=content, system=system, **fields)

    def stream_turn(
        self,
        content: str | None,
        system: str | None = None,
        revision: int | None = None,
        **fields: Any,
    ) -> Any:
        """Send a chat message, and stream the reply in the form of `stream`.

        content: None to continue the newest reply, or to get one if it was rewound.
        """
        return self._stream("/turns", revision, content=content, system=system, **fields)

    # Editing

    def insert(
        self, at: int, text: Text, recompute: str = "none", revision: int | None = None
    ) -> Any:
        """Insert a text before token `at`. recompute: "none", or "suffix" to evaluate the rest."""
        edit = {"op": "insert", "at": at, "recompute": recompute}
        return self._post("/edit", revision, **edit, **text_fields(text))

    def delete(
        self,
        start: int | str,
        end: int | None = None,
        recompute: str = "none",
        revision: int | None = None,
    ) -> Any:
        """Delete tokens, or a span. `Client.delete` deletes the session itself."""
        edit = {"op": "delete", "recompute": recompute, **_range_fields(start, end)}
        return self._post("/edit", revision, **edit)

    def replace(
        self,
        start: int | str,
        end: int | None,
        text: Text,
        recompute: str = "none",
        revision: int | None = None,
    ) -> Any:
        """Replace tokens, or a span, by a text."""
        edit = {"op": "replace", "recompute": recompute, **_range_fields(start, end)}
        return self._post("/edit", revision, **edit, **text_fields(text))

    def pin(self, start: int | str, end: int | None = None, revision: int | None = None) -> Any:
        """Protect tokens, or a span, from eviction."""
        return self._post("/pin", revision, **_range_fields(start, end))

    def unpin(self, start: int | str, end: int | None = None, revision: int | None = None) -> Any:
        """Let pinned tokens, or a span, be evicted again."""
        return self._post("/unpin", revision, **_range_fields(start, end))

    def name_span(self, name: str, start: int, end: int, revision: int | None = None) -> Any:
        """Name the tokens `start ... end - 1`."""
        return self._post("/spans", revision, name=name, start=start, end=end)

    def rewind(self, count: int, revision: int | None = None) -> Any:
        """Remove the newest `count` tokens."""
        return self._post("/rewind", revision, count=count)

    def compress(
        self,
        ratio: float = 4.0,
        method: str | None = None,
        budget: str | None = None,
        recent: int | None = None,
        revision: int | None = None,
    ) -> Any:
        """Compress the session by `ratio`. recent: newest tokens that stay as they are."""
        settings = {"method": method, "budget": budget, "recent": recent}
        return self._post("/compress", revision, ratio=ratio, **settings)

    def align(self, text: Text, revision: int | None = None, **options: Any) -> Any:
        """Make a text, token ids, or messages the whole text; options as of `Session.align`."""
        return self._post("/align", revision, **text_fields(text), **options)

    def compact(self, target: float = 0.5, revision: int | None = None, **settings: Any) -> Any:
        """Compact the session to `target` cells; settings as of `/v1/sessions/NAME/compact`."""
        return self._post("/compact", revision, target=target, **settings)

    def fork(
        self, name: str | None = None, at: int | None = None, revision: int | None = None
    ) -> Any:
        """Return a new RemoteSession that continues from this one's end, or from `at` tokens."""
        request = ApiRequest("POST", self._path("/fork"), {"name": name, "at": at}, revision)
        return self._client.send(request, lambda entry: RemoteSession(self._client, entry["name"]))

    def revert(self, to: str, revision: int | None = None) -> Any:
        """Replace the text and the title by those of another session, such as a fork of this one.

        The revision goes on, and the other session stays.
        """
        return self._post("/revert", revision, to=to)

    def stop(self) -> Any:
        """Stop the session's running generation, if any, whichever client started it."""
        return self._post("/stop", None)

    def save(self, revision: int | None = None) -> Any:
        """Save the session to the server's disk; it then survives a crash of the server."""
        return self._post("/save", revision)

    def snapshot(self, name: str, revision: int | None = None) -> Any:
        """Write a snapshot under a name, for `Client.restore`."""
        return self._post("/snapshot", revision, name=name)

    def set_resident(self, resident: bool = True, revision: int | None = None) -> Any:
        """Set whether the session is resident: kept in memory when others need room."""
        body = {"resident": resident}
        return self._client.send(ApiRequest("PUT", self._path("/resident"), body, revision))

    def stay(self, resident: bool = True, revision: int | None = None) -> Any:
        """Deprecated: use `set_resident`."""
        message = "RemoteSession.stay is deprecated: use RemoteSession.set_resident"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.set_resident(resident, revision)

    def set_title(self, title: str | None, revision: int | None = None) -> Any:
        """Set the session's display title; None to show its name."""
        body = {"title": title}
        return self._client.send(ApiRequest("PUT", self._path("/title"), body, revision))

    def _path(self, subpath: str) -> str:
        return f"/v1/sessions/{path_segment(self.name)}{subpath}"

    def _get(self, subpath: str, **params: Any) -> Any:
        return self._client.send(ApiRequest("GET", self._path(subpath), params=params))

    def _post(self, subpath: str, revision: int | None, /, **body: Any) -> Any:
        return self._client.send(ApiRequest("POST", self._path(subpath), body, revision))

    def _stream(self, subpath: str, revision: int | None, /, **body: Any) -> Any:
        body = {**body, "stream": True}
        return self._client.stream(ApiRequest("POST", self._path(subpath), body, revision))


def path_segment(name: str) -> str:
    """Return a name as one segment of a URL's path. Raises InvalidArgument if it cannot be one."""
    if name in ("", ".", "..") or "/" in name:  # servers would read another path
        raise InvalidArgument(f"{name!r:.120} is not a valid name")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name!r:.120} is not a valid name: {error}") from error


def _json_bytes(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError) as error:  # NaN, a lone surrogate, an object of another type
        raise InvalidArgument(f"the request cannot be sent as JSON: {error}") from error


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def text_fields(text: Text | None) -> dict[str, Any]:
    """Return the field of a request's body for a text, token ids, or messages."""
    if text is None:
        return {}
    if isinstance(text, str):
        return {"text": text}
    if not isinstance(text, Iterable) or isinstance(text, (bytes, Mapping)):
        raise InvalidArgument(
            f"expected text, token ids, or a list of messages; found {text!r:.100}"
        )
    items = list(text)  # messages or token ids
    return {"messages" if items and isinstance(items[0], Mapping) else "tokens": items}


def _range_fields(start: int | str, end: int | None) -> dict[str, Any]:
    """Return the fields for a range of tokens. start: its first token, or the name of a span."""
    return {"span": start} if isinstance(start, str) else {"start": start, "end": end}
