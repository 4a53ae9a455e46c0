"""`/v1/chat/completions`: the assistant's next message."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
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
)
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.server.errors import Problem, problem_of
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from kvkeep.server.health import now
from kvkeep.server.messages import template_messages
from kvkeep.server.openai.logprobs import chat_entry
from kvkeep.server.openai.usage import FINGERPRINT, REASONS, progress_of, timings_of, usage_of
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_ANSWERS, MOST_TOKENS, Body, Choosing, Owner, Serving
from kvkeep.server.service import Running, Service
from kvkeep.server.sse import DONE, event, stream
from kvkeep.server.tools import Tools, checked_tools
from kvkeep.session.sampling import Sampling

router = APIRouter()
_MOST_MESSAGES = 10_000


class StreamOptions(Body):
    include_usage: bool = False


class Format(Body):
    """type: text, json_object or json_schema; json_schema: {"name", "schema"} as OpenAI has it;
    schema: beside json_object, as llama.cpp has it."""

    type: str = "text"
    json_schema: dict[str, Any] | None = None
    of_object: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Chat(Choosing):
    """A request."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=_MOST_MESSAGES)]
    max_tokens: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
    n: Annotated[int | None, Field(ge=1, le=MOST_ANSWERS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: Format | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    ignore_eos: bool = False
    return_progress: bool = False

    @property
    def most(self) -> int | None:
        given = (self.max_completion_tokens, self.max_tokens)
        return next((number for number in given if number is not None), None)

    @property
    def continues(self) -> bool | None:
        """Whether the last message goes on; None where it does if it is the assistant's."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message lets the last message go on, and add_generation_prompt "
                "begins another: give one of them"
            )
        return False if self.add_generation_prompt else self.continue_final_message


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
@router.post("/chat/completions", response_model=None, include_in_schema=False)
async def chat(
    body: Chat, request: HttpRequest, service: Serving, owner: Owner
) -> Response | dict[str, Any]:
    """What the assistant says next, in `n` ways; as one answer or as a stream of events."""
    tools = checked_tools(body.tools or (), body.tool_choice)
    prompt = await prompt_ids(service, body.messages, tools, body.continues)
    likely = (body.top_logprobs or 0) if body.logprobs else None
    most = longest(service, body.most)
    ask = GenerationRequest(tuple(prompt), most, ignore_eos=body.ignore_eos, logprobs=likely)
    running = await asked(service, ask, owner, _samplings(service, body, tools))
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": now(), "model": service.name}
    reply = _Reply(service, body, tools, head)
    if body.stream:
        return stream(reply.streamed(running))
    async with running.until_gone(request):
        return await reply.whole(running)


@router.post("/v1/chat/completions/input_tokens", response_model=None)
@router.post("/chat/completions/input_tokens", response_model=None, include_in_schema=False)
async def input_tokens(body: Chat, service: Serving, owner: Owner) -> dict[str, Any]:
    """How many tokens the messages are; nothing is evaluated."""
    tools = checked_tools(body.tools or (), body.tool_choice)
    prompt = await prompt_ids(service, body.messages, tools, body.continues)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


async def prompt_ids(
    service: Service,
    messages: list[dict[str, Any]],
    tools: Tools | None = None,
    continues: bool | None = None,
) -> list[int]:
    """The messages as the model's template writes them, up to where the assistant begins.

    continues: whether it goes on with the last message; None where that is its own.
    """
    codec = service.model.text

    def encoded() -> list[int]:
        said, given = template_messages(messages), None
        if tools is not None:
            said, given = tools.messages(codec, said)
        own = [message["role"] == "assistant" for message in said[-2:]]
        if not (own[-1] if continues is None else continues):
            return codec.encode(codec.chat(said, tools=given))
        if own == [True, True]:
            raise InvalidArgument("the assistant's last message goes on, and there are two of them")
        return codec.chat_to_continue(said, given)

    return await asyncio.to_thread(encoded)  # of a long text it takes longer than others can wait


def longest(service: Service, most: int | None) -> int:
    """How many tokens an answer has at most where nobody says: no end is no sensible default."""
    return service.model.spec.max_positions if most is None else most


async def asked(
    service: Service, ask: GenerationRequest, owner: str, samplings: list[Sampling]
) -> Running:
    """The answers on their way. A prompt that does not fit is refused as llama.cpp does."""
    try:
        return await service.answers(ask, owner, samplings)
    except ContextFull as error:
        most = service.engine.settings.get("max_kv_size") or service.model.spec.max_positions
        more = {"n_prompt_tokens": len(ask.prompt), "n_ctx": most}
        raise Problem(400, str(error), "exceed_context_size_error", more=more) from error


def _samplings(service: Service, body: Chat, tools: Tools | None) -> list[Sampling]:
    samplings, schema = body.samplings(body.n or 1), None
    form = body.response_format or Format()
    if form.type == "json_object":
        schema = dict(ANY_OBJECT) if form.of_object is None else form.of_object
    elif form.type == "json_schema":
        schema = (form.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise InvalidArgument("response_format.json_schema.schema must be a JSON schema")
    elif form.type != "text":
        raise InvalidArgument(f"response_format.type cannot be {form.type!r}")
    schema = body.json_schema if schema is None else schema
    return forced_by(service, samplings, tools, schema, body.grammar)


def forced_by(
    service: Service,
    samplings: list[Sampling],
    tools: Tools | None,
    schema: dict[str, Any] | None = None,
    grammar: str | None = None,
) -> list[Sampling]:
    """The same, held to the call that must be made, to a schema, or to a grammar (GBNF).

    Raises InvalidArgument.
    """
    wanted, model = tools.schema() if tools is not None and tools.forced else schema, service.model
    if wanted is not None and grammar:
        raise InvalidArgument("a grammar goes with no schema, and with no call that must be made")
    if wanted is not None:
        return [replace(each, constraint=Grammar.of_schema(model, wanted)) for each in samplings]
    if grammar:
        return [replace(each, constraint=Grammar.of_gbnf(model, grammar)) for each in samplings]
    return samplings


@dataclass
class _Choice:
    """One answer as far as it is. sent: characters of its text that the client has."""

    text: str = ""
    sent: int = 0
    likely: list[dict[str, Any]] = field(default_factory=list)
    end: Finished | None = None


class _Reply:
    """Answers, made into what a client of chats reads."""

    def __init__(self, service: Service, body: Chat, tools: Tools | None, head: dict[str, Any]):
        self._codec, self._body, self._tools, self._head = service.model.text, body, tools, head
        self._choices = [_Choice() for _ in range(body.n or 1)]

    async def whole(self, running: Running) -> dict[str, Any]:
        async for index, each in running:
            self._take(self._choices[index], each)
        choices = [self._choice(*pair) for pair in enumerate(self._choices)]
        return {
            **self._head,
            "object": "chat.completion",
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **self._totals(),
        }

    async def streamed(self, running: Running) -> AsyncIterator[bytes]:
        try:
            for index in range(len(self._choices)):
                yield self._chunk(index, {"role": "assistant", "content": None})
            async for index, each in running:
                for chunk in self._chunks(index, each):
                    yield chunk
            options = self._body.stream_options
            if options and options.include_usage:
                yield event({**self._head, **_CHUNK, "choices": [], **self._totals()})
            yield DONE
        except Exception as error:  # the status is sent: what happened is the last event
            yield event(problem_of(error).body())

    def _take(self, choice: _Choice, each: GenerationEvent) -> dict[str, Any] | None:
        """Takes an event in; the probability of its token, if it has one."""
        entry = None
        if isinstance(each, GeneratedToken):
            entry = chat_entry(self._codec, each)
            choice.likely += [entry] if entry else []
        if isinstance(each, (GeneratedToken, Finished)):
            choice.text += each.text
        if isinstance(each, Finished):
            choice.end = each
        return entry

    def _chunks(self, index: int, each: GenerationEvent) -> list[bytes]:
        choice = self._choices[index]
        entry = self._take(choice, each)
        if isinstance(each, PrefillProgress):
            return [self._progress(index, each)] if self._body.return_progress else []
        if isinstance(each, Finished):
            return self._last(index, choice, each)
        upto = self._certain(choice.text)
        delta = {"content": choice.text[choice.sent : upto]} if upto > choice.sent else {}
        choice.sent = max(choice.sent, upto)
        if not delta and not entry:
            return []
        return [self._chunk(index, delta, likely=entry)]

    def _certain(self, text: str) -> int:
        """How many characters cannot be part of a call any more."""
        if self._tools is None:
            return len(text)
        if self._tools.forced or text.lstrip()[:1] in ("{", "["):
            return 0
        at = text.find("<")
        return len(text) if at < 0 else at

    def _last(self, index: int, choice: _Choice, end: Finished) -> list[bytes]:
        text, calls = self._parts(choice)
        chunks = []
        if rest := text[choice.sent :]:
            chunks.append(self._chunk(index, {"content": rest}))
        for number, call in enumerate(calls):
            chunks.append(self._chunk(index, {"tool_calls": [{"index": number, **call}]}))
        timings = {"timings": timings_of(end.usage)}
        chunks.append(self._chunk(index, {}, _reason(end, calls), more=timings))
        return chunks

    def _parts(self, choice: _Choice) -> tuple[str, list[dict[str, Any]]]:
        if self._tools is None:
            return choice.text, []
        text, calls = self._tools.calls(choice.text)
        return (text, [call.entry() for call in calls]) if calls else (choice.text, [])

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        assert choice.end is not None
        text, calls = self._parts(choice)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": choice.likely} if self._body.logprobs else None,
            "finish_reason": _reason(choice.end, calls),
        }

    def _totals(self) -> dict[str, Any]:
        usages = [choice.end.usage for choice in self._choices if choice.end]
        return {"usage": usage_of(usages), "timings": timings_of(usages[0])}

    def _progress(self, index: int, each: PrefillProgress) -> bytes:
        return self._chunk(index, {}, more={"prompt_progress": progress_of(each)})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        likely: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        choice["logprobs"] = {"content": [likely]} if likely else None
        return event({**self._head, **_CHUNK, "choices": [choice], **(more or {})})


_CHUNK = {"object": "chat.completion.chunk", "system_fingerprint": FINGERPRINT}


def _reason(end: Finished, calls: list[dict[str, Any]]) -> str:
    return "tool_calls" if calls and end.reason != "length" else REASONS[end.reason]
