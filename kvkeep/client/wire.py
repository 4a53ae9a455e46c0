"""What goes over the wire: requests, answers, errors, and events."""

import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from kvkeep import errors

TRIES = 3  # of a request whose answer was lost on its way
Event = tuple[str, Any]  # a name, and what came with it
Then = Callable[[Any], Any]


@dataclass(frozen=True)
class Call:
    """A request. A change has a key, by which the server makes it once however often it is sent."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] | None = None
    revision: int | None = None

    def __post_init__(self) -> None:
        if self.method != "GET":
            object.__setattr__(self, "_key", uuid.uuid4().hex)

    @property
    def headers(self) -> dict[str, str]:
        key = getattr(self, "_key", None)
        found = {} if key is None else {"Idempotency-Key": key}
        if self.revision is not None:
            found["If-Match"] = f'"{self.revision}"'
        return found

    @property
    def fields(self) -> dict[str, Any]:
        """For httpx."""
        body = None if self.method in ("GET", "DELETE") else dict(self.body or {})
        params = {name: value for name, value in (self.params or {}).items() if value is not None}
        return {"headers": self.headers, "json": body, "params": params}


class Sender(Protocol):
    """A client, as its sessions see it: it gives answers, or what they are to be awaited by."""

    def send(self, call: Call, then: Then = lambda found: found) -> Any: ...

    def stream(self, call: Call) -> Any: ...


def answer_of(response: httpx.Response) -> Any:
    """Raises the error that a server tells of, as the engine raises it."""
    if response.is_success:
        return response.json()
    raise _error(response)


def _error(response: httpx.Response) -> errors.KvkeepError:
    try:
        told = response.json()["error"]
        message, code = str(told["message"]), told.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"the server answered with status {response.status_code}", None
    status = response.status_code
    if status == 429:
        return errors.NoRoom(message, _seconds(response.headers.get("Retry-After")))
    if code == "too_large":
        return errors.NoRoom(message, math.inf)
    kinds: dict[Any, type[errors.KvkeepError]] = {
        "session_not_found": errors.NoSuchSession,
        "session_busy": errors.Busy,
        "key_at_work": errors.Busy,
        "wrong_revision": errors.WrongRevision,
        "exceed_context_size_error": errors.ContextFull,
        "cancelled": errors.Cancelled,
        "locked": errors.Locked,
    }
    by_status = {400: errors.InvalidArgument, 404: errors.InvalidArgument}
    return kinds.get(code, by_status.get(status, errors.ServerError))(message)


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isascii() and text.isdigit() else 1.0


def unreachable(error: httpx.TransportError, url: object) -> errors.ServerError:
    return errors.ServerError(f"no answer from {url}: {str(error) or type(error).__name__}")


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Of server-sent events, whose lines these are."""
    parser = Parser()
    for line in lines:
        event = parser.push(line)
        if event is not None:
            yield event


class Parser:
    """Takes the lines of a stream one by one."""

    def __init__(self) -> None:
        self._name, self._data = "message", list[str]()

    def push(self, line: str) -> Event | None:
        """An event, where the line ends one. Raises ServerError for one that tells of an error."""
        if line.startswith("event:"):
            self._name = line[6:].strip()
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        if line or not self._data:
            return None
        name, content = self._name, json.loads("\n".join(self._data))
        self._name, self._data = "message", []
        if name == "error":
            raise errors.ServerError(content["error"]["message"])
        return name, content
