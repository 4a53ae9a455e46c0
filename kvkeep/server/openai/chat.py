"""`/v1/chat/completions`: the assistant's next message."""

import secrets
import time
from collections.abc import AsyncIterator
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
    Usage,
)
from kvkeep.errors import InvalidArgument
from kvkeep.server.errors import api_error_for
from kvkeep.server.generation import constrain, prompt_ids, start_generations
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.openai.usage import (
    FINGERPRINT,
    FINISH_REASONS,
    chat_logprobs,
    llamacpp_progress,
    llamacpp_timings,
    openai_usage,
)
from kvkeep.server.schemas import (
    MAX_GENERATIONS,
    MAX_TOKENS,
    OwnerDep,
    RequestBody,
    SamplingParams,
    ServiceDep,
    StreamOptions,
)
from kvkeep.server.service import GenerationResult, GenerationStream, Service
from kvkeep.server.sse import DONE, JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.server.tools import Tools, checked_tools
from kvkeep.session.sampling import Sampling

router = APIRouter()
_MAX_MESSAGES = 10_000


class ResponseFormat(RequestBody):
    """The wanted form of the output.

    type: text, json_object or json_schema. json_schema: {"name", "schema"}, as in OpenAI's API.
    schema: beside json_object, as in llama.cpp.
    """

    type: str = "text"
    json_schema: dict[str, Any] | None = None
    object_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ChatRequest(SamplingParams):
    messages: Annotated[list[dict[str, Any]], Field(max_length=_MAX_MESSAGES)]
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_GENERATIONS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    ignore_eos: bool = False
    return_progress: bool = False

    @property
    def token_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def continue_final(self) -> bool | None:
        """Whether to continue the last message; None for "if it is the assistant's"."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message continues the last message, and add_generation_prompt "
                "begins another: give one of them"
            )
        return False if self.add_generation_prompt else self.continue_final_message

    def wanted_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that the output must follow. Raises InvalidArgument."""
        schema = None
        form = self.response_format or ResponseFormat()
        if form.type == "json_object":
            schema = dict(ANY_OBJECT) if form.object_schema is None else form.object_schema
        elif form.type == "json_schema":
            schema = (form.json_schema or {}).get("schema")
            if not isinstance(schema, dict):
                raise InvalidArgument("response_format.json_schema.schema must be a JSON schema")
        elif form.type != "text":
            raise InvalidArgument(f"response_format.type cannot be {form.type!r}")
        return self.json_schema if schema is None else schema


@router.post("/v1/chat/completions", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/chat/completions", response_model=None, include_in_schema=False)
async def chat(
    body: ChatRequest, http_request: HttpRequest, service: ServiceDep, owner: OwnerDep
) -> Response | dict[str, Any]:
    """Generate the assistant's next message, in `n` choices."""
    tools = checked_tools(body.tools or (), body.tool_choice)
    prompt = await prompt_ids(service, body.messages, tools, body.continue_final)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = service.max_tokens(body.token_limit)
    request = GenerationRequest(tuple(prompt), limit, ignore_eos=body.ignore_eos, logprobs=logprobs)
    samplings = _samplings(service, body, tools)
    generations = await start_generations(service, request, owner, samplings)
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": FINGERPRINT,
    }
    if body.stream:
        return sse_response(_ChatStream(service, body, tools, head).events(generations))
    async with generations.cancel_on_disconnect(http_request):
        results = await generations.collect()
    return _completion(service, body, tools, head, results)


@router.post("/v1/chat/completions/input_tokens", response_model=None)
@router.post("/chat/completions/input_tokens", response_model=None, include_in_schema=False)
async def input_tokens(body: ChatRequest, service: ServiceDep, owner: OwnerDep) -> dict[str, Any]:
    """Count the tokens of the messages; nothing is evaluated."""
    tools = checked_tools(body.tools or (), body.tool_choice)
    prompt = await prompt_ids(service, body.messages, tools, body.continue_final)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def _samplings(service: Service, body: ChatRequest, tools: Tools | None) -> list[Sampling]:
    samplings = body.samplings(body.n or 1)
    return constrain(service, samplings, tools, body.wanted_schema(), body.grammar)


def _completion(
    service: Service,
    body: ChatRequest,
    tools: Tools | None,
    head: dict[str, Any],
    results: list[GenerationResult],
) -> dict[str, Any]:
    """Return the response of a request that does not stream."""
    choices = []
    for index, result in enumerate(results):
        text, calls = _split_calls(tools, result.text)
        message = {"role": "assistant", "content": text or (None if calls else "")}
        entries = [chat_logprobs(service.model.text, sampled) for sampled in result.tokens]
        choices.append(
            {
                "index": index,
                "message": {**message, "tool_calls": calls} if calls else message,
                "logprobs": {"content": list(filter(None, entries))} if body.logprobs else None,
                "finish_reason": _finish_reason(result.end, calls),
            }
        )
    totals = _totals([result.end.usage for result in results])
    return {**head, "object": "chat.completion", "choices": choices, **totals}


class _ChatStream:
    """The chunks of a streamed response.

    Text that may turn out to be a tool call is held back until the generation has finished.
    """

    def __init__(
        self, service: Service, body: ChatRequest, tools: Tools | None, head: dict[str, Any]
    ):
        self._codec, self._body, self._tools = service.model.text, body, tools
        self._head = {**head, "object": "chat.completion.chunk"}
        count = body.n or 1
        self._texts = [""] * count
        self._sent = [0] * count  # characters of each text that the client has
        self._usages: list[Usage | None] = [None] * count

    async def events(self, generations: GenerationStream) -> AsyncIterator[bytes]:
        try:
            for index in range(len(self._texts)):
                yield self._chunk(index, {"role": "assistant", "content": None})
            async for index, progress in generations:
                for chunk in self._chunks(index, progress):
                    yield chunk
            options = self._body.stream_options
            if options and options.include_usage:
                totals = _totals([usage for usage in self._usages if usage])
                yield sse_event({**self._head, "choices": [], **totals})
            yield DONE
        except Exception as error:  # the status is already sent: the last event reports the error
            yield sse_event(api_error_for(error).openai_body())

    def _chunks(self, index: int, progress: GenerationEvent) -> list[bytes]:
        if isinstance(progress, PrefillProgress):
            if not self._body.return_progress:
                return []
            return [self._chunk(index, {}, extra={"prompt_progress": llamacpp_progress(progress)})]
        assert isinstance(progress, (GeneratedToken, Finished))
        self._texts[index] += progress.text
        if isinstance(progress, Finished):
            return self._last_chunks(index, progress)
        text, sent = self._texts[index], self._sent[index]
        end = max(sent, self._releasable(text))
        self._sent[index] = end
        entry = chat_logprobs(self._codec, progress)
        if end == sent and not entry:
            return []
        return [self._chunk(index, {"content": text[sent:end]} if end > sent else {}, entry=entry)]

    def _releasable(self, text: str) -> int:
        """Return how many characters cannot be part of a tool call."""
        if self._tools is None:
            return len(text)
        if self._tools.forced or text.lstrip()[:1] in ("{", "["):
            return 0
        at = text.find("<")
        return len(text) if at < 0 else at

    def _last_chunks(self, index: int, end: Finished) -> list[bytes]:
        self._usages[index] = end.usage
        text, calls = _split_calls(self._tools, self._texts[index])
        chunks = []
        if rest := text[self._sent[index] :]:
            chunks.append(self._chunk(index, {"content": rest}))
        for number, call in enumerate(calls):
            chunks.append(self._chunk(index, {"tool_calls": [{"index": number, **call}]}))
        timings = {"timings": llamacpp_timings(end.usage)}
        chunks.append(self._chunk(index, {}, _finish_reason(end, calls), extra=timings))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        entry: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        choice["logprobs"] = {"content": [entry]} if entry else None
        return sse_event({**self._head, "choices": [choice], **(extra or {})})


def _split_calls(tools: Tools | None, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split generated text into text and tool calls in OpenAI's form."""
    if tools is None:
        return text, []
    rest, calls = tools.parse(text)
    return rest, [call.openai_entry() for call in calls]


def _totals(usages: list[Usage]) -> dict[str, Any]:
    return {"usage": openai_usage(usages), "timings": llamacpp_timings(usages[0])}


def _finish_reason(end: Finished, calls: list[dict[str, Any]]) -> str:
    return "tool_calls" if calls and end.reason != "length" else FINISH_REASONS[end.reason]
