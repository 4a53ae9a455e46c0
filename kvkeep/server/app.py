"""The ASGI application: all APIs and the web UI over one service."""

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from kvkeep.errors import KvkeepError
from kvkeep.server import anthropic, health
from kvkeep.server.errors import ERROR_RESPONSES, ApiError, api_error_for
from kvkeep.server.idempotency import IdempotencyMiddleware
from kvkeep.server.llamacpp import auxiliary, completion
from kvkeep.server.openai import chat, completions, responses
from kvkeep.server.security import SecurityMiddleware
from kvkeep.server.service import ContextDep, Service
from kvkeep.server.sessions import editing, generate, lifecycle, views
from kvkeep.version import __version__

_log = logging.getLogger("kvkeep.server")
_ROUTES = (
    *(health, chat, completions, responses, anthropic, completion, auxiliary),
    *(lifecycle, generate, editing, views),
)
_PAGE = Path(__file__).parent / "page" / "files"  # the web UI: plain files over the APIs
_EXPECTED_ERRORS = (ApiError, KvkeepError, RequestValidationError, HTTPException)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_page_routes = APIRouter(include_in_schema=False)


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the document without FastAPI's 422: malformed requests get 400 here."""
        document = super().openapi()  # made once: later calls return the same object
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def application(
    service: Service,
    hosts: Collection[str] = LOCAL_HOSTS,
    origins: Collection[str] = (),
    middleware: Callable[[Any], Any] = IdempotencyMiddleware,
) -> Any:
    """Return the ASGI application.

    hosts: allowed Host headers. origins: web origins that may send requests. middleware: wraps the
    routes, inside the security checks.
    """
    app = _Application(
        title="kvkeep",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
    )
    app.state.service = service
    for module in _ROUTES:
        app.include_router(module.router)
    app.include_router(_page_routes)
    app.mount("/page", StaticFiles(directory=_PAGE))
    for error_type in (*_EXPECTED_ERRORS, Exception):
        app.add_exception_handler(error_type, _error_response)
    inner = middleware(app)
    if origins:
        inner = CORSMiddleware(
            inner, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return SecurityMiddleware(inner, service, hosts, origins)


@_page_routes.get("/")
async def page() -> Response:
    return FileResponse(_PAGE / "index.html", headers={"Cache-Control": "no-cache"})


@_page_routes.get("/favicon.ico")
async def icon() -> Response:
    return FileResponse(_PAGE / "icon.svg", media_type="image/svg+xml")


@_page_routes.get("/v1/page")
async def page_settings(context: ContextDep) -> dict[str, Any]:
    """Return the model's name, and whether the web UI may change sessions."""
    return {"edits": context.service.allow_edit, "model": context.service.name}


async def _error_response(request: HttpRequest, error: Exception) -> JSONResponse:
    if not isinstance(error, _EXPECTED_ERRORS):
        _log.error("%s %s", request.method, request.url.path, exc_info=error)
    return api_error_for(error).response(request.url.path)
