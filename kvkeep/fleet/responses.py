"""What an application answers, kept back where it must not be told yet."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_ENDS = (b"event: done", b"event: error")


class Response:
    """Lets a stream of events go by as it comes, but its end; keeps all of any other answer.

    So nobody is told that something is done before it is. `finish` sends what was kept.
    """

    def __init__(self, send: Send, most: int = 0):
        """most: bytes of the body that are remembered, if it is no longer."""
        self._send, self._most, self._size = send, most, 0
        self._kept = list[Message]()
        self._parts = list[bytes]()
        self.status = 0
        self.headers = list[tuple[bytes, bytes]]()
        self.begun = False  # whether the client has been sent anything
        self.ended = False
        self.failed = False  # whether the stream has said that it failed

    @property
    def streams(self) -> bool:
        kinds = [value for name, value in self.headers if name.lower() == b"content-type"]
        return any(kind.startswith(b"text/event-stream") for kind in kinds)

    @property
    def whole(self) -> bool:
        """Whether the application has answered to the end, and well."""
        return self.ended and 0 < self.status < 400 and not self.failed

    @property
    def body(self) -> bytes | None:
        """None for one that was too long."""
        return b"".join(self._parts) if self._size <= self._most else None

    async def send(self, message: Message) -> None:
        """For the application."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        else:
            body = message.get("body", b"")
            self._size += len(body)
            if self._size <= self._most:
                self._parts.append(body)
            self.failed = self.failed or (self.streams and body.startswith(_ENDS[1]))
            self.ended = self.ended or not message.get("more_body", False)
        last = message.get("body", b"").startswith(_ENDS) or self.ended
        if self._kept or last or not self.streams:
            self._kept.append(message)
            return
        self.begun = True
        await self._send(message)

    async def through(self, message: Message) -> None:
        """For an application that changes nothing: all goes by."""
        self.begun = True
        await self._send(message)

    async def finish(self) -> None:
        """What was kept reaches the client."""
        kept, self._kept = self._kept, []
        for message in kept:
            await self._send(message)

    async def replace(self, problem: Any, event: bytes) -> None:
        """Another end than the application's: `event` where a stream has begun, else `problem`."""
        self._kept.clear()
        if self.begun:
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await problem({"type": "http"}, _nothing, self._send)


class Body:
    """A body that was taken in, given to the application; then whatever the client does.

    gone: is set where the client has gone away, or where it is to look so.
    """

    def __init__(self, body: bytes, receive: Receive):
        self._body: bytes | None = body
        self._receive = receive
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self.receive_on()

    async def receive_on(self) -> Message:
        """What comes after the body."""
        if not self.gone.is_set():
            coming = asyncio.ensure_future(self._receive())
            going = asyncio.ensure_future(self.gone.wait())
            try:
                await asyncio.wait((coming, going), return_when=asyncio.FIRST_COMPLETED)
                if coming.done() and coming.result()["type"] != "http.disconnect":
                    return coming.result()
            finally:
                coming.cancel()
                going.cancel()
            self.gone.set()
        return {"type": "http.disconnect"}


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
