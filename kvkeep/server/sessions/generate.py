"""Feeding a session, and generating in it."""

from asyncio import to_thread
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from kvkeep.chat.continuation import ContinuedReader
from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_chat import parse_messages
from kvkeep.chat.output import OutputEvent, joined_output
from kvkeep.chat.renderer import RenderOptions
from kvkeep.engine import (
    Finished,
    GeneratedToken,
    GenerationRequest,
    PrefillProgress,
    RequestLike,
)
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.body_route import body_router
from kvkeep.server.generation_stream import GenerationResult, GenerationStream
from kvkeep.server.ignored_fields import SESSION_RULES
from kvkeep.server.limits import MAX_TOKENS, LongText, Messages, TokenIds
from kvkeep.server.notices import Notices
from kvkeep.server.openai.usage import llamacpp_timings
from kvkeep.server.schemas import SamplingParams
from kvkeep.server.sessions.entry import SessionContext, SessionDep, SpanName
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.session.session import Session

router = body_router()


class FeedRequest(SamplingParams):
    """The input to prefill: a text, token ids, or messages for the chat template.

    span: a name for these tokens. special: whether the text of control tokens is parsed.
    """

    text: LongText | None = None
    tokens: TokenIds | None = None
    messages: Messages | None = None
    span: SpanName | None = None
    special: bool = False
    stream: bool = False

    def require_one_input(self) -> None:
        """Raise InvalidArgument for several of text, tokens and messages."""
        if sum(value is not None for value in (self.text, self.tokens, self.messages)) > 1:
            raise InvalidArgument("use exactly one of text, tokens and messages")

    def encode(self, model: Model, notices: Notices, generation_prompt: bool) -> tuple[int, ...]:
        """Return the token ids. generation_prompt: whether messages end where the reply begins."""
        self.require_one_input()
        if self.messages is not None:
            options = RenderOptions(continue_final=False, generation_prompt=generation_prompt)
            prompt = model.renderer.render(self.chat(), options)
            notices.warn(*prompt.warnings)
            return tuple(prompt.ids)
        return tuple(self.tokens or model.text.encode(self.text or "", self.special))

    def chat(self) -> Chat:
        """Return the conversation of `messages`."""
        return Chat(parse_messages(self.messages))

    def name_span(self, session: Session, num_prefilled: int, num_sampled: int) -> None:
        """Give the prefilled tokens, which precede the sampled ones, the name `span`, if any."""
        end = len(session.tokens) - num_sampled
        if self.span is not None and num_prefilled:
            session.name(self.span, end - num_prefilled, end)


class GenerateRequest(FeedRequest):
    """speculate: whether to try tokens that the text has had before; by default as the server."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 256
    ignore_eos: bool = False
    speculate: bool | None = None


@router.post("/v1/sessions/{name}/feed", response_model=None, responses=JSON_OR_EVENTS)
async def feed(body: FeedRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill a text at the session's end."""
    SESSION_RULES.check(body, context.notices)
    ids = await to_thread(body.encode, context.service.model, context.notices, False)
    if not ids:
        raise InvalidArgument("nothing to prefill: send text, tokens or messages")
    request = GenerationRequest(ids, 0, on_end=body.name_span)
    return await _run(request, context, body.stream)


@router.post("/v1/sessions/{name}/generate", response_model=None, responses=JSON_OR_EVENTS)
async def generate(body: GenerateRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill the input, if there is any, and generate."""
    SESSION_RULES.check(body, context.notices)
    ids = await to_thread(body.encode, context.service.model, context.notices, True)
    (sampling,) = body.samplings(context.default_sampling)
    request = GenerationRequest(
        *(ids, body.max_tokens, sampling, body.ignore_eos),
        speculate=body.speculate,
        on_end=body.name_span,
    )
    return await _run(request, context, body.stream)


async def _run(
    request: RequestLike, context: SessionContext, as_stream: bool
) -> Response | dict[str, Any]:
    """Run a request in the session, whose text is returned as it is."""
    stream = await context.generate(request, context.name, context.revision)
    return await respond(stream, context, as_stream)


async def respond(
    stream: GenerationStream,
    context: SessionContext,
    as_stream: bool,
    reader: ContinuedReader | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Response | dict[str, Any]:
    """Return the response for a generation.

    reader: of a chat's answer; None for text that is returned as it is. extra: more fields.
    """
    if as_stream:
        return sse_response(_stream_events(stream, reader, extra), stream.aclose, "error")
    (result,) = await context.collect(stream)
    if reader is not None:
        for sampled in result.tokens:
            reader.push(sampled.pieces)
        reader.push([result.finished.text])
        reader.finish()
    return {**_response(result, reader), **extra}


async def _stream_events(
    stream: GenerationStream,
    reader: ContinuedReader | None,
    extra: Mapping[str, Any],
) -> AsyncIterator[bytes]:
    """Yield events `read` (prefill progress) and `token`, and last `done` or `error`."""
    async for _, event in stream:
        if isinstance(event, PrefillProgress):
            yield sse_event({"done": event.done, "total": event.total}, "read")
        elif isinstance(event, GeneratedToken):
            fields = {"text": event.text} if reader is None else _read(reader.push(event.pieces))
            yield sse_event({"token": event.token, **fields}, "token")
        elif isinstance(event, Finished):
            rest = {"text": event.text}
            if reader is not None:
                rest = _read([*reader.push([event.text]), *reader.finish()])
            if any(rest.values()):
                yield sse_event({"token": None, **rest}, "token")  # text that was held back
    yield sse_event({**_response(stream.results[0], reader), **extra}, "done")


def _read(events: Sequence[OutputEvent]) -> dict[str, str]:
    """Return the text and, if there is some, the reasoning of an answer's events."""
    output = joined_output(events)
    reasoning = {"reasoning": output.reasoning} if output.reasoning else {}
    return {"text": output.text, **reasoning}


def _response(result: GenerationResult, reader: ContinuedReader | None) -> dict[str, Any]:
    finished, output = result.finished, None if reader is None else reader.output
    return {
        "text": result.text if output is None else output.text,
        **({"reasoning": output.reasoning} if output and output.reasoning else {}),
        "tokens": [sampled.token for sampled in result.tokens],
        "finish_reason": finished.reason,
        "read": finished.usage.prompt,
        "total_tokens": finished.total_tokens,
        "revision": finished.revision,
        "timings": llamacpp_timings(finished.usage),
    }
