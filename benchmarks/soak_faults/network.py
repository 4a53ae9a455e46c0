"""A TCP proxy between users and a server, whose connections can be cut, refused, slow or held."""

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_CHUNK_BYTES = 16_384
_SLOW_BYTES, _SLOW_SECONDS = 256, 0.05  # about 5 kB/s
_RESET_SHARE = 0.5  # of the chunks, while connections are reset
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # of SO_LINGER


class Network:
    """A proxy for a port of this machine, in a thread of its own.

    port: where it listens. In its faults, which last some seconds, nothing but connections is lost:
    what arrives is what was sent, or its beginning.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self._target, self._rng = target, random.Random(seed)
        self._condition: Literal["clear", "reset", "slow", "held"] = "clear"
        self._connections = set[asyncio.StreamWriter]()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.port = 0
        self._listener = self._run(self._listen())

    def cut(self, seconds: float) -> None:
        """Reset connections in the middle of requests and responses; then refuse new ones."""
        self._condition = "reset"
        time.sleep(seconds / 2)
        self._condition = "clear"
        self._run(self._refuse())
        time.sleep(seconds / 2)
        self._listener = self._run(self._listen())

    def slow(self, seconds: float) -> None:
        """Pass some kilobytes a second; then hold everything back."""
        self._condition = "slow"
        time.sleep(seconds / 2)
        self._condition = "held"
        time.sleep(seconds / 2)
        self._condition = "clear"

    def close(self) -> None:
        """Reset all connections, and accept no others."""
        self._run(self._refuse())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> asyncio.Server:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = listener.sockets[0].getsockname()[1]
        return listener

    async def _refuse(self) -> None:
        self._listener.close()
        for connection in list(self._connections):
            _reset(connection)

    async def _serve(self, from_user: asyncio.StreamReader, to_user: asyncio.StreamWriter) -> None:
        """Pass bytes in both directions until one end closes its connection."""
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server was killed
            _reset(to_user)
            return
        ends = {to_user, to_server}
        self._connections |= ends
        directions = [
            asyncio.ensure_future(self._pass(from_user, to_server)),
            asyncio.ensure_future(self._pass(from_server, to_user)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections -= ends
            for direction in directions:
                direction.cancel()
            for end in ends:
                _reset(end) if self._condition == "reset" else end.close()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(_CHUNK_BYTES):
                if self._condition == "reset" and self._rng.random() < _RESET_SHARE:
                    sink.write(chunk[: self._rng.randrange(len(chunk))])
                    await sink.drain()
                    return
                while chunk and self._condition == "slow":
                    sink.write(chunk[:_SLOW_BYTES])
                    await asyncio.sleep(_SLOW_SECONDS)
                    chunk = chunk[_SLOW_BYTES:]
                while self._condition == "held":
                    await asyncio.sleep(_SLOW_SECONDS)
                sink.write(chunk)
                await sink.drain()


def _reset(end: asyncio.StreamWriter) -> None:
    """Close a connection at once, so that its other end gets ECONNRESET."""
    with suppress(OSError, AttributeError):
        end.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE
        )
    end.transport.abort()
