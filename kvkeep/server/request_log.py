"""The log of `kvkeep serve --verbose`: a line for each request, and for each generation."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("kvkeep.server.requests")
# Loggers that have something to say of each request, at level INFO.
_LOGGERS = (_log, logging.getLogger("kvkeep.engine.generations"))


def log_requests() -> None:
    """Print the log to standard error, with the time of day."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for logger in _LOGGERS:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class RequestLogMiddleware:
    """Logs each request at its end: method, path without query, status, and seconds."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            seconds = time.perf_counter() - start
            path = scope["path"].encode("unicode_escape").decode()  # no line of its own making
            _log.info("%s %s %s %.2f s", scope["method"], path, status or "aborted", seconds)
