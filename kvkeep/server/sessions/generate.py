"""Feeding a session, generating in it, and chat turns in it."""

from asyncio import to_thread, wrap_future
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_chat import parse_messages
from kvkeep.chat.output import OutputEvent, joined_output
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.renderer import RenderOptions
from kvkeep.engine import (
    Finished,
    GeneratedToken,
    GenerationRequest,
    PrefillProgress,
    RequestLike,
    SessionRecord,
    SessionRequest,
)
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import title_for
from kvkeep.server.generation_stream import GenerationResult, GenerationStream
from kvkeep.server.ignored_fields import SESSION_RULES
from kvkeep.server.limits import MAX_TOKENS, LongText, Messages, TokenIds
from kvkeep.server.notices import Notices
from kvkeep.server.openai.usage import llamacpp_timings
from kvkeep.server.schemas import SamplingParams
from kvkeep.server.sessions.compaction import compact_before_turn, report_fields
from kvkeep.server.sessions.entry import SessionContext, SessionDep, SpanName, session_response
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.session.conversation import CHAT_NOTES_KEY, Conversation
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session
from kvkeep.session.stop_gate import ReasoningMarkers
from kvkeep.session.turn_template import count_system_tokens

router = body_router()
_TEMPLATE_TOKENS = 64  # that a chat template writes around a message, at most


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


class TurnRequest(SamplingParams):
    """A user's turn. Without content, the newest answer is continued, or given if there is none.

    system: the system prompt, before the first turn only. speculate: as of `GenerateRequest`.
    detached: whether the answer goes on when the client is gone, until it is complete or stopped.
    """

    content: Annotated[LongText | None, Field(min_length=1)] = None
    system: LongText | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1024
    stream: bool = False
    speculate: bool | None = None
    detached: bool = False


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


@router.post("/v1/sessions/{name}/turns", response_model=None, responses=JSON_OR_EVENTS)
async def say(body: TurnRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill a user's turn, as the chat template renders it, and generate the reply.

    Without `content`, continue the newest reply, or start it if the newest turn has none (after a
    rewind to its start, or an alignment that ends with a question).
    Spans name the parts: "turn 2", "turn 2 question", "turn 2 answer", "system".
    """
    SESSION_RULES.check(body, context.notices)
    (sampling,) = body.samplings(context.default_sampling)
    model = context.service.model
    reader = await to_thread(model.renderer.new_reader)  # the first one renders with the template
    new_tokens = 0  # of the message, in a chat that has begun
    if body.content is not None:
        ids = await to_thread(model.text.encode, body.content)
        new_tokens = len(ids) + _TEMPLATE_TOKENS

    def most_tokens(record: SessionRecord) -> int:
        return new_tokens + body.max_tokens if record.live.tokens else 0

    def require_fit(record: SessionRecord) -> None:
        sampling.require_vocabulary(model.spec.vocab_size)
        _require_system(record, body.system)

    request = SessionRequest(partial(_turn_request, model, body, sampling), most_tokens)
    report, revision = await compact_before_turn(context, new_tokens, require_fit)
    context = replace(context, revision=revision)
    extra = {} if report is None else {"compaction": report_fields(report)}
    stream = await context.generate(request, context.name, context.revision, body.detached)
    return await _respond(stream, context, body.stream, reader, extra)


@router.post("/v1/sessions/{name}/stop", response_model=None)
async def stop(context: SessionDep) -> Response:
    """Stop the session's running generation, if any, whichever client started it."""
    arguments = (context.name, context.owner, session_response, context.revision)
    return await wrap_future(context.engine.stop(*arguments))


def _turn_request(
    model: Model, body: TurnRequest, sampling: Sampling, record: SessionRecord
) -> GenerationRequest:
    """Begin a turn in a session, and return the request for its reply, or for more of it."""
    sampling.require_vocabulary(model.spec.vocab_size)
    chat, question = _conversation(model, record, body.system), body.content
    if question is None:
        chat.reopen_turn()
        return GenerationRequest(
            (),
            body.max_tokens,
            sampling,
            speculate=body.speculate,
            on_end=lambda *_: chat.end_turn(),
        )
    renderer = model.renderer
    markers = ReasoningMarkers.of(renderer.output_format, renderer.starts_in_reasoning)
    sampling = replace(sampling, reasoning=markers)
    chat.require_room(question)
    if chat.is_open:
        chat.end_turn()
    is_first, ids = not chat.last_turn, chat.begin_turn(question)

    def on_end(session: Session, num_prefilled: int, num_generated: int) -> None:
        if num_prefilled < len(ids):  # cancelled during prefill
            chat.cancel_turn(question, ids, num_prefilled)
            return
        chat.name_turn(question, len(ids), num_generated)
        chat.end_turn()

    return GenerationRequest(
        *(tuple(ids), body.max_tokens, sampling),
        title=title_for(question) if is_first else "",
        speculate=body.speculate,
        on_end=on_end,
    )


def _conversation(model: Model, record: SessionRecord, system: str | None) -> Conversation:
    """Return the session's chat, which its notes describe. system: of a new chat."""
    _require_system(record, system)
    session, current_system = record.live, _system_prompt(record)
    if not session.tokens and system is not None:
        current_system = system
        _keep_system_prompt(model, session, system)
    chat = Conversation(session, model.text, model.end_token_ids, current_system)
    record.notes = {**record.notes, CHAT_NOTES_KEY: chat.notes}
    return chat


def _require_system(record: SessionRecord, system: str | None) -> None:
    """Raise InvalidArgument if a chat has begun with another system prompt. system: of a turn."""
    if record.live.tokens and system not in (None, _system_prompt(record)):
        raise InvalidArgument(
            "this chat already started with another system prompt, or without one: leave system "
            "out, edit the span 'system text', or create a new session"
        )


def _system_prompt(record: SessionRecord) -> str | None:
    prompt: str | None = record.notes.get(CHAT_NOTES_KEY, {}).get("system")
    return prompt


def _keep_system_prompt(model: Model, session: Session, system: str) -> None:
    """Increase `keep` so that policies that keep first tokens never evict the system prompt."""
    if session.policy not in ("sliding", "shift"):
        return
    count, budget = count_system_tokens(model.text, system), session.max_kv_size
    if count >= budget:
        raise InvalidArgument(
            f"the system prompt takes {count} tokens and is never evicted, which leaves no room in "
            f"a budget of {budget}: shorten it, or create a session with a larger max_kv_size"
        )
    session.keep = max(session.keep, count)


async def _run(
    request: RequestLike, context: SessionContext, as_stream: bool
) -> Response | dict[str, Any]:
    """Run a request in the session, whose text is returned as it is."""
    stream = await context.generate(request, context.name, context.revision)
    return await _respond(stream, context, as_stream)


async def _respond(
    stream: GenerationStream,
    context: SessionContext,
    as_stream: bool,
    reader: OutputReader | None = None,
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
    reader: OutputReader | None,
    extra: Mapping[str, Any],
) -> AsyncIterator[bytes]:
    """Yield events `read` (prefill progress) and `token`, and last `done` or `error`."""
    async for _, event in stream:
        if isinstance(event, PrefillProgress):
            yield sse_event({"done": event.done, "total": event.total}, "read")
        elif isinstance(event, GeneratedToken):
            fields = {"text": event.text} if reader is None else _read(reader.push(event.pieces))
            yield sse_event({"token": event.token, **fields}, "token")
        elif isinstance(event, Finished) and reader is not None:
            rest = _read([*reader.push([event.text]), *reader.finish()])
            if any(rest.values()):
                yield sse_event({"token": None, **rest}, "token")  # text that was held back
    yield sse_event({**_response(stream.results[0], reader), **extra}, "done")


def _read(events: Sequence[OutputEvent]) -> dict[str, str]:
    """Return the text and, if there is some, the reasoning of an answer's events."""
    output = joined_output(events)
    reasoning = {"reasoning": output.reasoning} if output.reasoning else {}
    return {"text": output.text, **reasoning}


def _response(result: GenerationResult, reader: OutputReader | None) -> dict[str, Any]:
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
