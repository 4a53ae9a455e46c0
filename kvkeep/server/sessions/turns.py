"""A chat in a session: each turn reads what is new of it, and nothing twice."""

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import GenerationRequest, turn
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_TOKENS, Choosing, Owner, Serving
from kvkeep.server.sessions.entry import Name, Revision
from kvkeep.server.sessions.writing import answered

router = APIRouter()


class Turn(Choosing):
    """What the user says. system: before the first turn, what the model is told of itself."""

    content: Annotated[str, Field(min_length=1)]
    system: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 1024
    stream: bool = False


@router.post("/v1/sessions/{name}/turns", response_model=None, responses=STREAMED)
async def say(
    name: Name, body: Turn, request: HttpRequest, service: Serving, owner: Owner, revision: Revision
) -> Response | dict[str, Any]:
    """Reads a turn as the model's template writes it, and answers.

    Spans name the parts: "turn 2", "turn 2 question", "turn 2 answer", "system".
    """
    (sampling,) = body.samplings(temperature=0.0)
    ask = turn(
        service.model, body.content, GenerationRequest((), body.max_tokens, sampling), body.system
    )
    return await answered(name, body.stream, ask, request, service, owner, revision)
