"""`/v1/chat/completions`: the assistant's next message."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.generation import constrain, prompt_ids, start_generations
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.ignored_fields import CHAT_RULES
from kvkeep.server.openai import usage
from kvkeep.server.schemas import MAX_BATCH, MAX_TOKENS, CompletionParams, RequestBody
from kvkeep.server.service import ContextDep, GenerationResult, GenerationStream
from kvkeep.server.sse import DONE, JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.server.tools import ParsedCall, Tools, validate_tools

router = APIRouter()
_MAX_MESSAGES = 10_000


class ResponseFormat(RequestBody):
    """The requested output format.

    type: text, json_object or json_schema. json_schema: {"name", "schema"}, as in OpenAI's API.
    schema: beside json_object, as in llama.cpp.
    """

    type: str = "text"
    json_schema: dict[str, Any] | None = None
    object_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ChatRequest(CompletionParams):
    messages: Annotated[list[dict[str, Any]], Field(max_length=_MAX_MESSAGES)]
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_BATCH)] = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    return_progress: bool = False

    @property
    def continue_final(self) -> bool | None:
        """Whether to continue the last message; None for "if it is the assistant's"."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message continues the last message, and add_generation_prompt "
                "starts a new one: use only one of them"
            )
        return False if self.add_generation_prompt else self.continue_final_message

    def validate_tools(self) -> Tools:
        return validate_tools(self.tools or (), self.tool_choice)

    def output_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the output must follow; None for any text."""
        output_format = self.response_format or ResponseFormat()
        if output_format.type == "text":
            return self.json_schema
        if output_format.type == "json_object":
            schema = output_format.object_schema
            return ANY_OBJECT if schema is None else schema
        if output_format.type != "json_schema":
            raise InvalidArgument(f"response_format.type {output_format.type!r} is not supported")
        schema = (output_format.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise InvalidArgument("response_format.json_schema.schema must be a JSON schema")
        return schema


@router.post("/v1/chat/completions", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/chat/completions", response_model=None, include_in_schema=False)
async def chat(body: ChatRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Generate the assistant's next message, in `n` choices."""
    CHAT_RULES.check(body, context.notices)
    schema, tools = body.output_schema(), body.validate_tools()
    ids = await prompt_ids(context, body.messages, tools, body.continue_final)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = context.service.max_tokens(limit)
    request = GenerationRequest(tuple(ids), limit, ignore_eos=body.ignore_eos, logprobs=logprobs)
    samplings = body.samplings(context.default_sampling, body.n or 1)
    samplings = constrain(context, samplings, tools, schema, body.grammar)
    stream = await start_generations(context, request, samplings)
    common_fields = usage.completion_fields("chatcmpl", context.service)
    common_fields["system_fingerprint"] = usage.SYSTEM_FINGERPRINT
    output = _ChatOutput(body, tools, context.tokenizer, common_fields)
    if body.stream:
        return sse_response(output.events(stream))
    return output.response(await context.collect(stream))


@router.post("/v1/chat/completions/input_tokens", response_model=None)
@router.post("/chat/completions/input_tokens", response_model=None, include_in_schema=False)
async def input_tokens(body: ChatRequest, context: ContextDep) -> dict[str, Any]:
    """Count the tokens of the messages without evaluating them."""
    tools = body.validate_tools()
    ids = await prompt_ids(context, body.messages, tools, body.continue_final)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@dataclass(frozen=True)
class _ChatOutput:
    """The choices of a response, whole or in chunks; text that may be a tool call comes last."""

    body: ChatRequest
    tools: Tools
    tokenizer: TextCodec
    common_fields: dict[str, Any]  # fields of every chunk
    sent_lengths: Counter[int] = field(default_factory=Counter)  # characters, by choice

    def response(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        fields = {**self.common_fields, "object": "chat.completion", "choices": choices}
        return {**fields, **usage.usage_and_timings(results)}

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        text, calls = self.tools.parse(result.text)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = [call.openai_entry() for call in calls]
        logprobs = [
            usage.logprobs_entry(self.tokenizer, event) for event in result.tokens if event.logprob
        ]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": logprobs} if self.body.logprobs else None,
            "finish_reason": _finish_reason(result.finished.reason, calls),
        }

    async def events(self, stream: GenerationStream) -> AsyncIterator[bytes]:
        for index in range(len(stream.results)):
            yield self._chunk(index, {"role": "assistant", "content": None})
        async for index, event in stream:
            text = stream.results[index].text
            if isinstance(event, Finished):
                for chunk in self._last_chunks(index, text, event):
                    yield chunk
            elif isinstance(event, GeneratedToken):
                start, end = self.sent_lengths[index], self._length_before_calls(text)
                self.sent_lengths[index] = max(start, end)
                delta = {"content": text[start:end]} if end > start else {}
                if delta or event.logprob:
                    yield self._chunk(index, delta, sampled=event)
            elif self.body.return_progress:
                yield self._chunk(index, {}, prompt_progress=usage.llamacpp_progress(event))
        if self.body.streams_usage:
            yield self._event([], **usage.usage_and_timings(stream.results))
        yield DONE

    def _length_before_calls(self, text: str) -> int:
        """Return how many of the first characters cannot be part of a tool call."""
        if not self.tools:
            return len(text)
        if self.tools.forced or text.lstrip()[:1] in ("{", "["):
            return 0
        return len(text.partition("<")[0])

    def _last_chunks(self, index: int, text: str, finished: Finished) -> Iterator[bytes]:
        text, calls = self.tools.parse(text)
        if unsent_text := text[self.sent_lengths[index] :]:
            yield self._chunk(index, {"content": unsent_text})
        for call_index, call in enumerate(calls):
            yield self._chunk(index, {"tool_calls": [{"index": call_index, **call.openai_entry()}]})
        reason = _finish_reason(finished.reason, calls)
        yield self._chunk(index, {}, reason, timings=usage.llamacpp_timings(finished.usage))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        sampled: GeneratedToken | None = None,
        **extra: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        if sampled and sampled.logprob:
            choice["logprobs"] = {"content": [usage.logprobs_entry(self.tokenizer, sampled)]}
        return self._event([choice], **extra)

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        fields = {**self.common_fields, "object": "chat.completion.chunk", "choices": choices}
        return sse_event({**fields, **extra})


def _finish_reason(reason: str, calls: Sequence[ParsedCall]) -> str:
    return "tool_calls" if calls and reason != "length" else usage.FINISH_REASONS[reason]
