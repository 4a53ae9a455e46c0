"""`/v1/chat/completions`: the assistant's next message."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from kvkeep.chat.control_items import unknown_part_types
from kvkeep.chat.openai_tools import hosted_tools
from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.alignment import own_fields
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import ChatInput, StopAfterFirstCall, chat_input
from kvkeep.server.generation import STREAM_PATIENCE, start_generations
from kvkeep.server.generation_stream import GenerationResult, GenerationStream, StreamEvent
from kvkeep.server.ignored_fields import CHAT_RULES
from kvkeep.server.openai import usage
from kvkeep.server.openai.cache_breakpoints import requested_pins
from kvkeep.server.openai.chat_choices import ChatChoice
from kvkeep.server.openai.chat_request import ChatRequest
from kvkeep.server.service import ContextDep
from kvkeep.server.sse import DONE, JSON_OR_EVENTS, sse_event, sse_response

router = body_router()
_NAMING_ROLES = ("tool", "function")  # whose names say which call a result is of


@router.post("/v1/chat/completions", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/chat/completions", response_model=None, include_in_schema=False)
async def chat(body: ChatRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Generate the assistant's next message, in `n` choices."""
    CHAT_RULES.check(body, context.notices)
    context.notices.ignore(*(f"tools.{kind}" for kind in hosted_tools(body.tools)))
    for message in body.messages:
        context.notices.ignore(*unknown_part_types(message.get("content"), "messages.content"))
        if message.get("name") and message.get("role") not in _NAMING_ROLES:
            context.notices.ignore("messages.name")
    schema, grammar, logprobs = body.output_schema(), body.output_grammar(), body.num_logprobs
    prompt = await chat_input(context, body.chat, body.render_options())
    limit = context.service.max_tokens(body.token_limit)
    request = GenerationRequest(
        tuple(prompt.ids),
        limit,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        pins=await requested_pins(context, body, prompt, body.messages, body.chat),
        **body.own_settings(context),
        written_tokens=prompt.written_tokens,
        title=prompt.title,
    )
    samplings = body.samplings(context.default_sampling, body.n or 1)
    budget = body.max_reasoning_tokens
    prompt, samplings = await prompt.constrain(samplings, schema, grammar, budget)
    single_call = body.uses_functions or body.parallel_tool_calls is False
    ends: Sequence[StopAfterFirstCall | None] = [None] * len(samplings)
    if single_call and prompt.chat.callable_tools:
        samplings, ends = StopAfterFirstCall.add(samplings)
    patience = STREAM_PATIENCE if body.stream else None
    stream = await start_generations(context, request, samplings, patience)
    common_fields = usage.completion_fields("chatcmpl", context.service)
    common_fields["system_fingerprint"] = usage.SYSTEM_FINGERPRINT
    choices = [
        _choice(body, prompt, early_end, result)
        for early_end, result in zip(ends, stream.results, strict=True)
    ]
    output = _ChatOutput(body, choices, context.tokenizer, common_fields)
    if body.stream:
        return sse_response(output.events(stream), stream.aclose)
    return output.response(await context.collect(stream, on_event=output.push))


def _choice(
    body: ChatRequest,
    prompt: ChatInput,
    early_end: StopAfterFirstCall | None,
    result: GenerationResult,
) -> ChatChoice:
    tools = {tool.name: tool for tool in prompt.chat.callable_tools}
    return ChatChoice(prompt.new_reader(result), tools, early_end, body.uses_functions)


@router.post("/v1/chat/completions/input_tokens", response_model=None)
@router.post("/chat/completions/input_tokens", response_model=None, include_in_schema=False)
async def input_tokens(body: ChatRequest, context: ContextDep) -> dict[str, Any]:
    """Count the tokens of the messages without evaluating them."""
    prompt = await chat_input(context, body.chat, body.render_options())
    return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


@dataclass(frozen=True)
class _ChatOutput:
    """The choices of a response, whole or in chunks."""

    body: ChatRequest
    choices: Sequence[ChatChoice]
    tokenizer: TextCodec
    common_fields: dict[str, Any]  # fields of every chunk

    def push(self, index: int, event: StreamEvent) -> None:
        if not isinstance(event, PrefillProgress):
            self.choices[index].push(event)

    def response(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        fields = {**self.common_fields, "object": "chat.completion", "choices": choices}
        return {**fields, **self._usage(results)}

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        choice = self.choices[index]
        tokens = [token for token in choice.tokens if token.logprob]
        logprobs = [usage.logprobs_entry(self.tokenizer, token) for token in tokens]
        return {
            "index": index,
            "message": choice.message(),
            "logprobs": {"content": logprobs} if self.body.logprobs else None,
            "finish_reason": choice.finish_reason(result.finished),
        }

    async def events(self, stream: GenerationStream) -> AsyncIterator[bytes]:
        for index in range(len(stream.results)):
            yield self._chunk(index, {"role": "assistant", "content": None})
        async for index, event in stream:
            if isinstance(event, PrefillProgress):
                if self.body.return_progress:
                    yield self._chunk(index, {}, prompt_progress=usage.llamacpp_progress(event))
                continue
            for chunk in self._chunks(index, event):
                yield chunk
        if self.body.streams_usage:
            yield self._event([], **self._usage(stream.results))
        yield DONE

    def _usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self.choices)
        return usage.usage_and_timings(results, reasoning_tokens)

    def _chunks(self, index: int, event: GeneratedToken | Finished) -> list[bytes]:
        """Return the chunks of an event."""
        choice = self.choices[index]
        chunks = [
            self._chunk(index, delta, tokens=tokens)
            for delta, tokens in choice.deltas(choice.push(event))
        ]
        if isinstance(event, Finished):
            extra: dict[str, Any] = {"timings": usage.llamacpp_timings(event.usage)}
            extra |= own_fields(event.usage)
            chunks.append(self._chunk(index, {}, choice.finish_reason(event), **extra))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        tokens: Sequence[GeneratedToken] = (),
        **extra: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        if entries := [
            usage.logprobs_entry(self.tokenizer, token) for token in tokens if token.logprob
        ]:
            choice["logprobs"] = {"content": entries}
        return self._event([choice], **extra)

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        fields = {**self.common_fields, "object": "chat.completion.chunk", "choices": choices}
        return sse_event({**fields, **extra})
