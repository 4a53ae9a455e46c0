"""A session on a server: what can be done to it, by the names of `kvkeep.Session`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.client.wire import Call, Sender

Text = str | Sequence[int] | Sequence[Mapping[str, Any]]


class RemoteSession:
    """A session by its name. Nothing of it is here: each method asks the server.

    Of a `Client` methods return what the server answers, a dictionary where nothing else is said;
    of an `AsyncClient` they are awaited for that, and streams are iterated by `async for`.

    revision: of changes, that the session must be at; the server refuses others (WrongRevision).
    Raises, beside what methods name: NoSuchSession; Busy while it reads or writes; NoRoom, with
    `retry_after` in seconds; InvalidArgument; ServerError where no answer comes.
    """

    def __init__(self, client: Sender, name: str):
        self._client, self.name = client, name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # What it is

    def info(self) -> Any:
        """Its revision, bytes, settings and spans, without bringing it back to memory."""
        return self._get("")

    def memory(self) -> Any:
        """Which tokens are kept, pinned, in the window, compressed, forgotten; spans; bytes."""
        return self._get("/memory")

    def text(self, start: int = 0, end: int | None = None) -> Any:
        """Tokens `start ... end - 1`, each with its text; at most 4,096 of them."""
        return self._get("/text", start=start, end=end)

    def heads(self, layer: int | None = None, head: int | None = None) -> Any:
        """Cells of each layer and KV head; with both named, at which positions they stand."""
        return self._get("/heads", layer=layer, head=head)

    def events(self) -> Any:
        """A stream of each operation on it, as it is done: pairs of a name and what is told."""
        return self._client.stream(Call("GET", self._path("/events")))

    # Reading and writing

    def feed(self, text: Text, span: str | None = None, revision: int | None = None) -> Any:
        """Reads a text, token ids, or messages, on where it stands. span: the name they get."""
        return self._post("/feed", revision, **given(text), span=span)

    def generate(self, text: Text | None = None, revision: int | None = None, **how: Any) -> Any:
        """Reads what is given, if anything is, and writes on. how: max_tokens, temperature, ..."""
        return self._post("/generate", revision, **given(text), **how)

    def stream(self, text: Text | None = None, revision: int | None = None, **how: Any) -> Any:
        """The same as it comes: pairs of "read", "token" or "done" and what is told."""
        return self._stream("/generate", revision, **given(text), **how)

    def say(
        self, content: str, system: str | None = None, revision: int | None = None, **how: Any
    ) -> Any:
        """A turn of a chat, answered. system: before the first one."""
        return self._post("/turns", revision, content=content, system=system, **how)

    def stream_turn(
        self, content: str, system: str | None = None, revision: int | None = None, **how: Any
    ) -> Any:
        """The same as it comes, as of `stream`."""
        return self._stream("/turns", revision, content=content, system=system, **how)

    # Changing it

    def insert(
        self, at: int, text: Text, recompute: str = "none", revision: int | None = None
    ) -> Any:
        edit = {"op": "insert", "at": at, "recompute": recompute}
        return self._post("/edit", revision, **edit, **given(text))

    def delete(
        self,
        start: int | str,
        end: int | None = None,
        recompute: str = "none",
        revision: int | None = None,
    ) -> Any:
        """Takes tokens out, or a span. Of the session itself, see `Client.delete`."""
        edit = {"op": "delete", "recompute": recompute}
        return self._post("/edit", revision, **edit, **_place(start, end))

    def replace(
        self,
        start: int | str,
        end: int | None,
        text: Text,
        recompute: str = "none",
        revision: int | None = None,
    ) -> Any:
        edit = {"op": "replace", "recompute": recompute}
        return self._post("/edit", revision, **edit, **_place(start, end), **given(text))

    def pin(self, start: int | str, end: int | None = None, revision: int | None = None) -> Any:
        return self._post("/pin", revision, **_place(start, end))

    def unpin(self, start: int | str, end: int | None = None, revision: int | None = None) -> Any:
        return self._post("/unpin", revision, **_place(start, end))

    def name_span(self, name: str, start: int, end: int, revision: int | None = None) -> Any:
        return self._post("/spans", revision, name=name, start=start, end=end)

    def rewind(self, count: int, revision: int | None = None) -> Any:
        return self._post("/rewind", revision, count=count)

    def compress(
        self,
        ratio: float = 4.0,
        method: str | None = None,
        budget: str | None = None,
        recent: int | None = None,
        revision: int | None = None,
    ) -> Any:
        settings = {"method": method, "budget": budget, "recent": recent}
        return self._post("/compress", revision, ratio=ratio, **settings)

    # Keeping it

    def fork(
        self, name: str | None = None, at: int | None = None, revision: int | None = None
    ) -> Any:
        """A RemoteSession that goes on where this one stands, or stood after `at` tokens."""
        call = Call("POST", self._path("/fork"), set_fields(name=name, at=at), revision=revision)
        return self._client.send(call, lambda made: RemoteSession(self._client, made["name"]))

    def save(self, revision: int | None = None) -> Any:
        """Once it answers, a kill of the server does not undo it."""
        return self._post("/save", revision)

    def snapshot(self, name: str, revision: int | None = None) -> Any:
        """Writes what it is now under a name; see `Client.restore`."""
        return self._post("/snapshot", revision, name=name)

    def stay(self, resident: bool = True, revision: int | None = None) -> Any:
        """Whether it stays in memory, whatever others need."""
        call = Call("PUT", self._path("/resident"), {"resident": resident}, revision=revision)
        return self._client.send(call)

    # How

    def _path(self, what: str) -> str:
        return f"/v1/sessions/{self.name}{what}"

    def _get(self, what: str, **params: Any) -> Any:
        return self._client.send(Call("GET", self._path(what), params=params))

    def _post(self, what: str, revision: int | None, /, **body: Any) -> Any:
        return self._client.send(
            Call("POST", self._path(what), set_fields(**body), revision=revision)
        )

    def _stream(self, what: str, revision: int | None, /, **body: Any) -> Any:
        asked = set_fields(**body, stream=True)
        return self._client.stream(Call("POST", self._path(what), asked, revision=revision))


def set_fields(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def given(text: Text | None) -> dict[str, Any]:
    """A text, token ids or messages, as the server tells them apart."""
    if text is None:
        return {}
    if isinstance(text, str):
        return {"text": text}
    items = list(text)
    return {"messages" if items and isinstance(items[0], Mapping) else "tokens": items}


def _place(start: int | str, end: int | None) -> dict[str, Any]:
    return {"span": start} if isinstance(start, str) else {"start": start, "end": end}
