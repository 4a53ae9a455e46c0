"""Feeding a session, generating in it, and chat turns in it."""

from asyncio import to_thread
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import GeneratedToken, GenerationRequest, PrefillProgress, RequestLike, chat_turn
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.generation import normalized_messages
from kvkeep.server.openai.usage import llamacpp_timings
from kvkeep.server.schemas import MAX_TOKENS, SamplingParams, TokenId
from kvkeep.server.service import GenerationResult, GenerationStream
from kvkeep.server.sessions.entry import SessionContext, SessionDep, SpanName
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.session.session import Session

router = APIRouter()


class FeedRequest(SamplingParams):
    """The input to prefill: a text, token ids, or messages for the chat template.

    span: a name for these tokens. special: whether the text of control tokens is parsed.
    """

    text: str | None = None
    tokens: list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    span: SpanName | None = None
    special: bool = False
    stream: bool = False

    def encode(self, codec: TextCodec, generation_prompt: bool) -> tuple[int, ...]:
        """Return the token ids. generation_prompt: for messages, as of `TextCodec.chat`."""
        if sum(value is not None for value in (self.text, self.tokens, self.messages)) > 1:
            raise InvalidArgument("give one of text, tokens and messages")
        if self.messages is not None:
            messages = normalized_messages(self.messages)
            return tuple(codec.encode(codec.chat(messages, generation_prompt)))
        return tuple(self.tokens or codec.encode(self.text or "", self.special))

    def name_span(self, session: Session, prefilled: int, sampled: int) -> None:
        """Name the prefilled tokens, which precede the sampled ones, if there is a `span`."""
        end = len(session.tokens) - sampled
        if self.span is not None and prefilled:
            session.name(self.span, end - prefilled, end)


class GenerateRequest(FeedRequest):
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 256
    ignore_eos: bool = False


class TurnRequest(SamplingParams):
    """A user's turn. system: the system prompt, before the first turn only."""

    content: Annotated[str, Field(min_length=1)]
    system: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1024
    stream: bool = False


@router.post("/v1/sessions/{name}/feed", response_model=None, responses=JSON_OR_EVENTS)
async def feed(body: FeedRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill a text at the session's end."""
    ids = await to_thread(body.encode, context.codec, False)
    if not ids:
        raise InvalidArgument("nothing to prefill: give text, tokens or messages")
    request = GenerationRequest(ids, 0, on_end=body.name_span)
    return await _run(request, context, body.stream)


@router.post("/v1/sessions/{name}/generate", response_model=None, responses=JSON_OR_EVENTS)
async def generate(body: GenerateRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill what is given, if anything, and generate."""
    ids = await to_thread(body.encode, context.codec, True)
    (sampling,) = body.samplings(context.default_sampling)
    request = GenerationRequest(
        ids, body.max_tokens, sampling, body.ignore_eos, on_end=body.name_span
    )
    return await _run(request, context, body.stream)


@router.post("/v1/sessions/{name}/turns", response_model=None, responses=JSON_OR_EVENTS)
async def say(body: TurnRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill a user's turn, as the chat template renders it, and generate the reply.

    Spans name the parts: "turn 2", "turn 2 question", "turn 2 answer", "system".
    """
    (sampling,) = body.samplings(context.default_sampling)
    reply = GenerationRequest((), body.max_tokens, sampling)
    request = chat_turn(context.service.model, body.content, reply, body.system)
    return await _run(request, context, body.stream)


async def _run(
    request: RequestLike, context: SessionContext, streamed: bool
) -> Response | dict[str, Any]:
    generations = await context.generate(request, context.name, context.revision)
    if streamed:
        return sse_response(_stream(generations, context), error_name="error")
    (result,) = await context.collect(generations)
    return await _response(result, context)


async def _stream(generations: GenerationStream, context: SessionContext) -> AsyncIterator[bytes]:
    """Yield events `read` (prefill progress) and `token`, and last `done` or `error`."""
    async for _, event in generations:
        if isinstance(event, PrefillProgress):
            yield sse_event({"done": event.done, "total": event.total}, "read")
        elif isinstance(event, GeneratedToken):
            yield sse_event({"token": event.token, "text": event.text}, "token")
    yield sse_event(await _response(generations.results[0], context), "done")


async def _response(result: GenerationResult, context: SessionContext) -> dict[str, Any]:
    total_tokens, revision = await context.inspect(
        context.name, lambda record: (len(record.live.tokens), record.revision)
    )
    return {
        "text": result.text,
        "tokens": [sampled.token for sampled in result.tokens],
        "finish_reason": result.end.reason,
        "read": result.end.usage.prompt,
        "total_tokens": total_tokens,
        "revision": revision,
        "timings": llamacpp_timings(result.end.usage),
    }
