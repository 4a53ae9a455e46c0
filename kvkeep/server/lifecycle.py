"""The server while it runs: its socket, its signals, and how it ends."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from kvkeep.engine import Engine
from kvkeep.errors import InvalidArgument
from kvkeep.server.app import LOCAL_HOSTS, application
from kvkeep.server.health import now
from kvkeep.server.idempotency import Idempotent
from kvkeep.server.keys import Keys
from kvkeep.server.service import Service

_BACKLOG = 512


class _Server(uvicorn.Server):
    """Ends with its work done on a signal, and with status 0."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.closing = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def serve_on(
    engine: Engine,
    keys: Keys,
    options: dict[str, Any],
    around: Callable[[Any], Any] = Idempotent,
    drained: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves until a signal comes. options: of `kvkeep serve`. around: see `application`. drained:
    is awaited at the end, for what must still be done."""
    listening = _listening(options["host"], options["port"])
    host, port = listening.getsockname()[:2]
    name = options["alias"] or Path(engine.model.name).name
    service = Service(engine, name, keys, now(), edits=options["allow_edit"])
    hosts = {*LOCAL_HOSTS, options["host"], *options["allow_host"]}
    app = application(service, hosts, options["allow_origin"], around)
    config = uvicorn.Config(
        app,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(options["grace"])),
        lifespan="off",
    )
    if not options["quiet"]:
        shown = f"[{host}]" if ":" in host else host
        print(f"kvkeep serves {name} on http://{shown}:{port}", flush=True)
    asyncio.run(_serve(_Server(config, service), listening, drained))


async def _serve(
    server: uvicorn.Server, listening: socket.socket, drained: Callable[[], Awaitable[None]] | None
) -> None:
    try:
        await server.serve(sockets=[listening])
    finally:
        if drained is not None:
            await drained()


def free_port(host: str, port: int) -> int:
    """That port, or any for 0, for who cannot be handed a socket.

    Raises InvalidArgument where somebody listens there.
    """
    with _listening(host, port) as found:
        return int(found.getsockname()[1])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InvalidArgument(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from error
    listening.listen(_BACKLOG)
    return listening
