"""The application: every API over one service."""

import logging
from collections.abc import Callable, Collection
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from kvkeep.errors import KvkeepError
from kvkeep.server import health, metrics, page
from kvkeep.server.anthropic import messages
from kvkeep.server.errors import Problem, problem_of
from kvkeep.server.idempotency import Idempotent
from kvkeep.server.llamacpp import completion, slots, text
from kvkeep.server.openai import chat, completions, responses
from kvkeep.server.openapi import ERRORS, describe
from kvkeep.server.security import Safety
from kvkeep.server.service import Service
from kvkeep.server.sessions import changes, events, lifecycle, memory, turns, writing
from kvkeep.version import __version__

_log = logging.getLogger("kvkeep.server")
_ROOMS = (
    *(health, metrics, page, chat, completions, responses, messages, completion, slots, text),
    *(lifecycle, writing, turns, changes, memory, events),
)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def application(
    service: Service,
    hosts: Collection[str] = LOCAL_HOSTS,
    origins: Collection[str] = (),
    around: Callable[[Any], Any] = Idempotent,
) -> Any:
    """An ASGI application. hosts: under which it may be asked; origins: pages that may ask it;
    around: what is between those who are let in and the routes."""
    app = FastAPI(
        title="kvkeep", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS
    )
    describe(app)
    app.state.service = service
    for rooms in _ROOMS:
        app.include_router(rooms.router)
    app.mount("/page", page.FILES)
    for kind in (Problem, KvkeepError):
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    inner = around(app)
    if origins:
        inner = CORSMiddleware(
            inner, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return Safety(inner, service, hosts, origins)


async def _told(request: HttpRequest, error: Exception) -> JSONResponse:
    return problem_of(error).response(_is_anthropic(request))


async def _malformed(request: HttpRequest, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return Problem(400, message, param=place or None).response(_is_anthropic(request))


async def _refused(request: HttpRequest, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return Problem(error.status_code, str(error.detail), kind).response(_is_anthropic(request))


async def _failed(request: HttpRequest, error: Exception) -> JSONResponse:
    _log.error("%s %s", request.method, request.url.path, exc_info=error)
    return problem_of(error).response(_is_anthropic(request))


def _is_anthropic(request: HttpRequest) -> bool:
    return request.url.path.startswith("/v1/messages")
