"""Running the server: its socket, its signals, and its shutdown."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from kvkeep.chat.prompt_rules import select_rules
from kvkeep.engine import Engine
from kvkeep.errors import InvalidArgument
from kvkeep.server.app import LOCAL_HOSTS, application
from kvkeep.server.connections import connection_config
from kvkeep.server.idempotency import IdempotencyMiddleware
from kvkeep.server.keys import ApiKeys
from kvkeep.server.request_log import log_requests
from kvkeep.server.service import Service

_BACKLOG = 512  # connections that wait to be accepted
_ERROR_SECONDS = 1  # for requests to end with an error, after the grace


class _UvicornServer(uvicorn.Server):
    """Shuts down on SIGINT and SIGTERM so that the process exits with 0; prints the banner.

    grace: seconds after which generations that still run end with an error.
    """

    def __init__(self, config: uvicorn.Config, service: Service, banner: str, grace: float):
        super().__init__(config)
        self._service, self._banner, self._grace = service, banner, grace
        self._deadline = 0.0  # the end of the grace, of time.monotonic(); 0 before a signal

    @property
    def remaining_grace(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        grace = 0.0 if self._deadline else self._grace  # another signal ends it
        self._deadline = time.monotonic() + grace
        self._service.closing = True  # ends streams of events, which uvicorn would wait for
        asyncio.get_running_loop().call_later(grace, self._service.end_streams)
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # called by uvicorn, whose own raises them again
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, self.handle_exit, signal_number, None)
        print(self._banner, end="", flush=True)  # from here on, Ctrl-C is a shutdown
        try:
            yield
        finally:
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signal_number)


def run_server(
    engine: Engine,
    keys: ApiKeys,
    options: dict[str, Any],
    middleware: Callable[[Any], Any] = IdempotencyMiddleware,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until a signal, and close the engine.

    options: of `kvkeep serve`, by name. drain: awaited at the end.
    """
    listener = _listen(options["host"], options["port"])
    if options["verbose"]:
        log_requests()
    name = options["alias"] or Path(engine.model.name).name
    service = Service(
        engine,
        name,
        keys,
        int(time.time()),
        allow_edit=options["allow_edit"],
        context_policy=options["context_policy"],
        compact_at=options["compact_at"],
        prompt_rules=select_rules(options["prompt_rules"]),
    )
    hosts = {*LOCAL_HOSTS, options["host"], *options["allow_host"]}
    app = application(service, hosts, options["allow_origin"], middleware)
    timeout = math.ceil(options["grace"]) + _ERROR_SECONDS
    config = connection_config(app, timeout_graceful_shutdown=timeout)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    banner = "" if options["quiet"] else _banner(name, listener, options["allow_edit"])
    server = _UvicornServer(config, service, banner, options["grace"])

    async def serve_and_drain() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            if drain is not None:
                await drain()

    asyncio.run(serve_and_drain())
    _close(engine, server)


def _banner(name: str, listener: socket.socket, allow_edit: bool) -> str:
    """Return the lines that name the model and the addresses of a server."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    web_ui_mode = "chat and edits" if allow_edit else "read-only; see --allow-edit"
    urls = f"  OpenAI API  {url}/v1\n  Web UI      {url}/ ({web_ui_mode})\n"
    return f"kvkeep serves {name} on {url}\n{urls}"


def _close(engine: Engine, server: _UvicornServer) -> None:
    """Close the engine; answers without clients have what is left of the grace.

    Another signal ends the grace, and sessions are saved nevertheless.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        engine.close(0.0 if server.force_exit else server.remaining_grace)
    except KeyboardInterrupt:
        engine.close()


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a log record is not of a request that uvicorn cancelled at the shutdown."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def free_port(host: str, port: int) -> int:
    """Return the port, or a free one if it is 0. Raises InvalidArgument if it is in use."""
    with _listen(host, port) as listener:
        return int(listener.getsockname()[1])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        raise InvalidArgument(message) from error
    listener.listen(_BACKLOG)
    return listener
