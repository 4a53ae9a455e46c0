"""HTTP connections: their parser, their number, and how long a client may take for a request.

Each takes one of the files that the process may open.
"""

import asyncio
import fcntl
import logging
import resource
import sys
import termios
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Longer than clients keep idle connections, such as aiohttp for 15 s; as servers do by default.
IDLE_CONNECTION_SECONDS = 75
SEND_SECONDS = 60.0  # in which a client must take something of a response
HEADER_SECONDS = 30.0  # for a request's line and headers, from the first byte or the connection
MAX_HEADER_BYTES = 65_536  # of a request's line and headers together
_MAX_CONNECTIONS = 4096
_ENOUGH_FILES = (65_536, 10_240)  # the second one: the most that macOS allows
_MAX_BACKLOG = 512


def connection_config(app: Any, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for connections with limits. settings: of `uvicorn.Config`.

    The parser is h11 also where httptools is installed, which limits no headers. There are no
    WebSockets.
    """
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level=logging.WARNING,
        access_log=False,
        backlog=_backlog(),
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS,
        lifespan="off",
        **settings,
    )


def raise_file_limit() -> None:
    """Raise the limit of open files to what the system allows, which is often much more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for count in _ENOUGH_FILES:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft == resource.RLIM_INFINITY or soft >= allowed:
            return
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            return


def max_connections() -> int:
    """Return how many connections may be open: half of the files that the process may open.

    The rest is for the model and sessions, which could not be saved otherwise.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files < 0 else min(_MAX_CONNECTIONS, files // 2)


def _backlog() -> int:
    """Return how many connections are accepted before those beyond the limit are closed."""
    return min(_MAX_BACKLOG, max(1, max_connections() // 8))


class BoundedConnection(H11Protocol):
    """A connection that is closed if there are too many, or if headers do not arrive in time.

    It is aborted if its client takes nothing of a response: `transport.close` waits for that.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
            return
        transport.set_write_buffer_limits(high=0)  # `pause_writing` for any byte that is not taken
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._expect_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _expect_reading(self) -> None:
        size = self._unread_bytes()
        self._send_timer = self.loop.call_later(SEND_SECONDS, self._abort_unless_read, size)

    def _unread_bytes(self) -> int:
        """Return how many bytes wait here, and in the kernel where it says so."""
        count = self.transport.get_write_buffer_size()
        socket, answer = self.transport.get_extra_info("socket"), bytearray(4)
        if sys.platform == "linux" and socket is not None:
            with suppress(OSError, ValueError):  # it is closed
                fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, answer)
        return count + int.from_bytes(answer, sys.byteorder)

    def _abort_unless_read(self, earlier_size: int) -> None:
        """Abort if as many bytes wait as before. Nothing is added to them meanwhile."""
        if self._unread_bytes() < earlier_size:
            self._expect_reading()
        else:
            self.transport.abort()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
