"""Routes that parse and validate large bodies in a thread, and respond with JSON as it is."""

from asyncio import to_thread
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kvkeep.server.limits import parse_json

MAX_BYTES_AT_ONCE = 100_000  # of a body that is parsed without a thread


class BodyRoute(APIRoute):
    """A route that validates a large body before FastAPI does, which then takes the object.

    What an endpoint returns is JSON, or a response. FastAPI would copy JSON by its encoder, which
    takes longer than writing it, and leaves out keys that begin with `_sa`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any):
        super().__init__(
            path, _responding(endpoint, settings.get("status_code") or 200), **settings
        )

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field

        async def handle_large(request: HttpRequest) -> Response:
            large = _LargeRequest(request.scope, request.receive)
            large.validate = field.validate if field else None
            try:
                return await handle(large)
            except HTTPException as error:
                if large.errors:
                    raise RequestValidationError(large.errors) from error
                raise

        return handle_large


def _responding(
    endpoint: Callable[..., Coroutine[Any, Any, Any]], status_code: int
) -> Callable[..., Coroutine[Any, Any, Response]]:
    """Return an endpoint whose JSON becomes a response with the status."""

    @wraps(endpoint)
    async def respond(*arguments: Any, **named: Any) -> Response:
        result = await endpoint(*arguments, **named)
        return result if isinstance(result, Response) else JSONResponse(result, status_code)

    return respond


class _LargeRequest(HttpRequest):
    """A request whose `json` is the validated body, if that is large."""

    validate: Callable[..., tuple[Any, list[dict[str, Any]]]] | None = None
    errors: list[dict[str, Any]] | None = None

    async def json(self) -> Any:
        """Return the body. Raises JSONDecodeError, and HTTPException for `errors` and encodings."""
        body = await self.body()
        try:
            if len(body) <= MAX_BYTES_AT_ONCE or self.validate is None:
                return parse_json(body)
            value, self.errors = await to_thread(self._validated, body, self.validate)
        except UnicodeDecodeError as error:
            raise HTTPException(400, "the body must be JSON in UTF-8") from error
        if self.errors:
            raise HTTPException(400)
        return value

    @staticmethod
    def _validated(
        body: bytes, validate: Callable[..., tuple[Any, list[dict[str, Any]]]]
    ) -> tuple[Any, list[dict[str, Any]]]:
        return validate(parse_json(body), {}, loc=("body",))


def body_router() -> APIRouter:
    """Return a router of such routes."""
    return APIRouter(route_class=BodyRoute)
