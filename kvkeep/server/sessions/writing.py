"""A session is fed, and writes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import (
    Finished,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    SessionRecord,
)
from kvkeep.errors import InvalidArgument
from kvkeep.server.errors import problem_of
from kvkeep.server.messages import template_messages
from kvkeep.server.openai.usage import timings_of
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_TOKENS, Choosing, Owner, Serving
from kvkeep.server.service import Running, Service
from kvkeep.server.sessions.entry import Name, Revision, look
from kvkeep.server.sse import event, stream
from kvkeep.session.session import Session

router = APIRouter()
_Id = Annotated[int, Field(ge=0, lt=2**31)]


class Fed(Choosing):
    """What is to be read: a text, token ids, or messages as the model's template writes them.

    span: the name that it gets. special: whether the text of a control token is one.
    """

    text: str | None = None
    tokens: list[_Id] | None = None
    messages: list[dict[str, Any]] | None = None
    span: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    special: bool = False
    stream: bool = False

    def ids(self, service: Service, reply: bool) -> tuple[int, ...]:
        """reply: whether messages end where the assistant's next one begins."""
        given = [self.text is not None, self.tokens is not None, self.messages is not None]
        if sum(given) > 1:
            raise InvalidArgument("give one of text, tokens and messages")
        codec = service.model.text
        if self.messages is not None:
            chat = codec.chat(template_messages(self.messages), add_generation_prompt=reply)
            return tuple(codec.encode(chat))
        return tuple(self.tokens or codec.encode(self.text or "", self.special))

    def naming(self) -> Callable[[Session, int, int], None] | None:
        """Gives what was read its name; it lies before what was written."""
        name = self.span
        if name is None:
            return None

        def named(session: Session, read: int, written: int) -> None:
            behind = len(session.tokens) - written
            if read:
                session.name(name, behind - read, behind)

        return named


class Generate(Fed):
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 256
    ignore_eos: bool = False


@router.post("/v1/sessions/{name}/feed", response_model=None, responses=STREAMED)
async def feed(
    name: Name, body: Fed, request: HttpRequest, service: Serving, owner: Owner, revision: Revision
) -> Response | dict[str, Any]:
    """Reads a text on where the session stands."""
    ids = await asyncio.to_thread(body.ids, service, False)
    if not ids:
        raise InvalidArgument("nothing to read: give text, tokens or messages")
    ask = GenerationRequest(ids, 0, on_end=body.naming())
    return await answered(name, body.stream, ask, request, service, owner, revision)


@router.post("/v1/sessions/{name}/generate", response_model=None, responses=STREAMED)
async def generate(
    name: Name,
    body: Generate,
    request: HttpRequest,
    service: Serving,
    owner: Owner,
    revision: Revision,
) -> Response | dict[str, Any]:
    """Reads what is given, if anything is, and writes on."""
    ids = await asyncio.to_thread(body.ids, service, True)
    (sampling,) = body.samplings(temperature=0.0)
    ask = GenerationRequest(ids, body.max_tokens, sampling, body.ignore_eos, on_end=body.naming())
    return await answered(name, body.stream, ask, request, service, owner, revision)


async def answered(
    name: str,
    streamed: bool,
    ask: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
    request: HttpRequest,
    service: Service,
    owner: str,
    revision: int | None,
) -> Response | dict[str, Any]:
    """What a session writes when it is asked, whole or as it comes."""
    running = await service.answers(ask, owner, session=name, revision=revision)
    if streamed:
        return stream(_streamed(running, name, service, owner))
    async with running.until_gone(request):
        events = [each async for _, each in running]
    return await _total(events, name, service, owner)


async def _streamed(
    running: Running, name: str, service: Service, owner: str
) -> AsyncIterator[bytes]:
    """Events `read`, `token`, and at last `done` or `error`."""
    events: list[GenerationEvent] = []
    try:
        async for _, each in running:
            events.append(each)
            if isinstance(each, PrefillProgress):
                yield event({"done": each.done, "total": each.total}, "read")
            elif isinstance(each, GeneratedToken):
                yield event({"token": each.token, "text": each.text}, "token")
        yield event(await _total(events, name, service, owner), "done")
    except Exception as error:  # the status is sent: what happened is the last event
        yield event(problem_of(error).body(), "error")


async def _total(
    events: list[GenerationEvent], name: str, service: Service, owner: str
) -> dict[str, Any]:
    end = events[-1]
    assert isinstance(end, Finished)
    written = [each for each in events if isinstance(each, GeneratedToken)]
    tokens, now = await look(
        service, name, owner, lambda kept: (len(kept.live.tokens), kept.revision)
    )
    return {
        "text": "".join(each.text for each in written) + end.text,
        "tokens": [each.token for each in written],
        "finish_reason": end.reason,
        "read": end.usage.prompt,
        "total_tokens": tokens,
        "revision": now,
        "timings": timings_of(end.usage),
    }
