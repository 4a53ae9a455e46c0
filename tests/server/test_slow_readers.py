"""Connections of clients that do not read their responses, or read them slowly."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from kvkeep.server.connections import SEND_SECONDS, BoundedConnection, connection_config

SIZE = 4_000_000  # more than the system's buffers of a socket take


class ShiftedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved forward."""

    shift = 0.0

    def time(self) -> float:
        return super().time() + self.shift

    async def move(self, seconds: float) -> None:
        """Move the time forward, and run what is then due."""
        self.shift += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)


async def send_body(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(int(scope["path"][1:]))})


class Connected:
    """A client's socket, and the server's connection to it, of an app that sends zeros."""

    def __init__(self, loop: ShiftedLoop):
        self.loop, self.state = loop, ServerState()
        self.client, self._accepted = socket.socketpair()
        for end in (self.client, self._accepted):
            end.setblocking(False)

    async def open(self) -> "Connected":
        config = connection_config(send_body)
        config.load()
        self.protocol = BoundedConnection(config, self.state, {})
        await self.loop.connect_accepted_socket(lambda: self.protocol, self._accepted)
        return self

    @property
    def unread(self) -> int:
        return self.protocol.transport.get_write_buffer_size()

    @property
    def is_open(self) -> bool:
        return bool(self.state.connections)

    async def ask(self, size: int = SIZE, times: int = 1) -> None:
        """Send requests, and wait until a part of the first response waits to be read."""
        self.client.sendall(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % size * times)
        await self.loop.wait_until(lambda: self.unread > 0)


def run(scenario: Callable[[ShiftedLoop], object]) -> None:
    loop = ShiftedLoop()
    try:
        loop.run_until_complete(scenario(loop))  # type: ignore[arg-type]
    finally:
        loop.close()


@pytest.mark.parametrize("times", [1, 100], ids=["one", "pipelined"])
def test_a_client_that_does_not_read_loses_its_connection(times: int) -> None:
    async def scenario(loop: ShiftedLoop) -> None:
        connected = await Connected(loop).open()
        with connected.client:
            await connected.ask(times=times)
            await loop.move(SEND_SECONDS - 5)
            assert connected.is_open
            await loop.move(10)
            assert not connected.is_open

    run(scenario)


def test_a_close_waits_no_longer_for_a_client_that_does_not_read() -> None:
    """Also with so few bytes that a server need not wait before it sends more."""

    async def scenario(loop: ShiftedLoop) -> None:
        first, connected = await Connected(loop).open(), await Connected(loop).open()
        with first.client, connected.client:
            await first.ask()
            await connected.ask(SIZE - first.unread + 10_000)
            assert connected.unread < 30_000
            connected.protocol.transport.close()
            assert connected.is_open
            await loop.move(SEND_SECONDS + 5)
            assert not connected.is_open

    run(scenario)


@pytest.mark.parametrize("size", [300_000, 60_000])
def test_a_client_that_reads_slowly_gets_its_response(size: int) -> None:
    """Also if it takes less than makes the system accept more bytes from the server."""

    async def scenario(loop: ShiftedLoop) -> None:
        connected, received = await Connected(loop).open(), 0
        with connected.client:
            await connected.ask()
            while chunk := await loop.sock_recv(connected.client, size):
                received += len(chunk)
                await loop.move(SEND_SECONDS - 5)
        assert received > SIZE

    run(scenario)
