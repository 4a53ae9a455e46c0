"""Running the server: its socket, its signals, and its shutdown."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_THREAD_SECONDS = 0.5  # for idle threads to end with the process


class _UvicornServer(uvicorn.Server):
    """Shuts down on signals so that the process exits with 0; prints the banner.

    grace: seconds after which generations that still run end with an error.
    """

    def __init__(self, config: uvicorn.Config, service: Service, banner: str, grace: float):
        super().__init__(config)
        self._service, self._banner, self._grace = service, banner, grace
        self._deadline = math.inf  # the end of the grace, of time.monotonic(), after a signal
        self.grace_ended = asyncio.Event()  # set by a second signal, and once all is saved

    def remaining_grace(self, extra: float = 0.0) -> float:
        """Return the seconds until `extra` seconds after the grace; 0 without a signal."""
        has_grace = self._deadline < math.inf
        return max(0.0, self._deadline + extra - time.monotonic()) if has_grace else 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        grace = self._grace
        if self._deadline < math.inf:  # another signal ends it
            grace = 0.0
            self.grace_ended.set()
        self._deadline = time.monotonic() + grace
        self._service.closing = True  # ends streams of events, which uvicorn would wait for
        asyncio.get_running_loop().call_later(grace, self._service.end_streams)
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Shut down on signals that come within the block, and do nothing else on them.

        SIGHUP stays ignored where the parent process ignores it, as `nohup` does.
        """
        loop = asyncio.get_running_loop()
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        if previous[signal.SIGHUP] is signal.SIG_IGN:
            del previous[signal.SIGHUP]
        for number in previous:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number, handler in previous.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # called by uvicorn, whose own raises them again
        print(self._banner, end="", flush=True)
        yield


class _AbandonedThreads(ThreadPoolExecutor):
    """Runs functions in threads. Its shutdown waits for none of them."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_server(
    engine: Engine,
    keys: ApiKeys,
    options: dict[str, Any],
    middleware: Callable[[Any], Any] = IdempotencyMiddleware,
    drain: Callable[[Callable[[], float]], Awaitable[None]] | None = None,
) -> None:
    """Serve until a signal, and close the engine.

    options: of `kvkeep serve`, by name. drain: awaited at the end; its argument returns for how
    many seconds requests may still run. Threads of requests may outlast this: see `end_process`.
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

    async def serve_and_save() -> None:
        asyncio.get_running_loop().set_default_executor(_AbandonedThreads())
        with server.handling_signals():
            try:
                await server.serve(sockets=[listener])
            finally:
                try:
                    if drain is not None:
                        await drain(partial(server.remaining_grace, _ERROR_SECONDS))
                finally:
                    await _close(engine, server)

    asyncio.run(serve_and_save())


def _banner(name: str, listener: socket.socket, allow_edit: bool) -> str:
    """Return the lines that name the model and the addresses of a server."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    web_ui_mode = "chat and edits" if allow_edit else "read-only; see --allow-edit"
    urls = f"  OpenAI API  {url}/v1\n  Web UI      {url}/ ({web_ui_mode})\n"
    return f"kvkeep serves {name} on {url}\n{urls}"


async def _close(engine: Engine, server: _UvicornServer) -> None:
    """Close the engine; answers without clients have what is left of the grace.

    Another signal ends the grace, and sessions are saved nevertheless.
    """
    loop, grace = asyncio.get_running_loop(), server.remaining_grace()
    with ThreadPoolExecutor(2, "kvkeep-close") as threads:  # requests may hold all others
        closing = loop.run_in_executor(threads, engine.close, grace)
        closing.add_done_callback(lambda _: server.grace_ended.set())
        await server.grace_ended.wait()
        if not closing.done():
            await loop.run_in_executor(threads, engine.close)
        await closing


def end_process() -> None:
    """End the process with status 0 if threads would keep it, which cannot be interrupted.

    Such as one that encodes a long text. The engine must be closed.
    """
    deadline, main_thread = time.monotonic() + _THREAD_SECONDS, threading.main_thread()
    threads = [thread for thread in threading.enumerate() if thread is not main_thread]
    for thread in threads:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() and not thread.daemon for thread in threads):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its terminal is closed
                stream.flush()
        os._exit(0)


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
