"""The ASGI application: all APIs and the web UI over one service."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from kvkeep.models.hub.names import name_digest
from kvkeep.policies import largest_budgets
from kvkeep.server import embeddings, metrics
from kvkeep.server.anthropic import messages as anthropic
from kvkeep.server.errors import (
    ERROR_RESPONSES,
    EXPECTED_ERRORS,
    logged_api_error,
)
from kvkeep.server.idempotency import IdempotencyMiddleware
from kvkeep.server.llamacpp import auxiliary, completion, infill
from kvkeep.server.notices import (
    IGNORED_HEADER,
    RULES_HEADER,
    WARNING_HEADER,
    NoticesMiddleware,
)
from kvkeep.server.ollama import generation as ollama_generation
from kvkeep.server.ollama import models as ollama_models
from kvkeep.server.openai import chat, completions, models, responses
from kvkeep.server.openai import compaction as response_compaction
from kvkeep.server.request_log import RequestLogMiddleware
from kvkeep.server.security import OriginMiddleware, SecurityMiddleware
from kvkeep.server.service import ContextDep, Service
from kvkeep.server.sessions import (
    aligning,
    compaction,
    editing,
    events,
    generate,
    lifecycle,
    pins,
    reuse,
    turns,
    views,
)
from kvkeep.server.transport import TransportMiddleware
from kvkeep.version import __version__

_API_MODULES = (
    *(
        response_compaction,
        chat,
        completions,
        responses,
        models,
        anthropic,
        completion,
        infill,
        auxiliary,
    ),
    *(embeddings, ollama_generation, ollama_models),
    *(lifecycle, generate, turns, editing, aligning, compaction),
    *(views, events, reuse, pins, metrics),
)
_PAGE_FOLDER = Path(__file__).parent / "page" / "files"  # the web UI: plain files over the APIs
# Headers of responses that browsers may show to pages of allowed origins.
EXPOSED_HEADERS = (IGNORED_HEADER, WARNING_HEADER, RULES_HEADER, "Retry-After", "ETag")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_NO_CACHE = {"Cache-Control": "no-cache"}
_router, _page_router = APIRouter(), APIRouter(include_in_schema=False)


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Remove FastAPI's status 422 from the document: malformed requests get 400 here."""
        document = super().openapi()  # made once: later calls return the same object
        for path_item in document["paths"].values():
            for operation in path_item.values():
                operation["responses"].pop("422", None)
        for schema_name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(schema_name, None)
        return document


class _AnsweredErrors:
    """Drops the errors of requests that got a whole response, which Starlette raises all the same.

    uvicorn would log them once more, and close the connection, which a client may be about to use.
    """

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_complete
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            if not is_complete:
                raise


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        """Have browsers check each file: those of two versions do not work together."""
        response = super().file_response(*arguments, **options)
        response.headers.update(_NO_CACHE)
        return response


def application(
    service: Service,
    hosts: Collection[str] = LOCAL_HOSTS,
    origins: Collection[str] = (),
    middleware: Callable[[Any], Any] = IdempotencyMiddleware,
) -> Any:
    """Return the ASGI application. hosts, origins: allowed. middleware: runs behind the checks."""
    app = _Application(
        title="kvkeep",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
    )
    app.state.service = service
    for router in (
        _router,
        metrics.router,
        *(module.router for module in _API_MODULES),
        _page_router,
    ):
        app.include_router(router)
    app.mount("/page", GZipMiddleware(_PageFiles(directory=_PAGE_FOLDER)))
    for error_type in (*EXPECTED_ERRORS, Exception):
        app.add_exception_handler(error_type, _error_response)
    inner_app = TransportMiddleware(middleware(NoticesMiddleware(_AnsweredErrors(app))))
    checked_app: Any = SecurityMiddleware(inner_app, service)
    if origins:  # around the checks: a page of an allowed origin sees their errors
        checked_app = CORSMiddleware(
            checked_app,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestLogMiddleware(OriginMiddleware(checked_app, service, hosts, origins))


@_page_router.get("/")
async def page() -> Response:
    return FileResponse(_PAGE_FOLDER / "index.html", headers=_NO_CACHE)


@_page_router.get("/favicon.ico")
async def icon() -> Response:
    return FileResponse(_PAGE_FOLDER / "icon.svg", media_type="image/svg+xml")


@_page_router.get("/v1/page")
async def page_settings(context: ContextDep) -> dict[str, Any]:
    """Return the model's name, whether the web UI may change sessions, and their defaults.

    `budgets` are the largest ones of each policy; `name_digest` is of the name or path under which
    the model was loaded.
    """
    sampling = context.default_sampling
    return {
        "edits": context.service.allow_edit,
        "model": context.service.model_name,
        "name_digest": name_digest(context.engine.model.name),
        "policy": context.engine.default_policy,
        "max_kv_size": context.engine.default_max_kv_size,
        "budgets": largest_budgets(context.engine.model.spec.max_positions),
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "repeat_penalty": sampling.repetition_penalty,
        },
    }


@_router.get("/health")
@_router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    """Report that the server is up. The socket opens once the model is loaded."""
    return {"status": "ok"}


async def _error_response(request: HttpRequest, error: Exception) -> JSONResponse:
    path = request.url.path
    return logged_api_error(error, f"{request.method} {path}").response(path)
