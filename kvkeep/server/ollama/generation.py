"""`/api/chat` and `/api/generate`: answers of Ollama's API."""

from asyncio import to_thread
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from kvkeep.chat.output import TextDelta
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.fill_in_middle import FillInMiddle
from kvkeep.server.answer_tokens import AnswerTokens, Attributed, text_tokens
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import chat_input
from kvkeep.server.generation import constrain, start_generations
from kvkeep.server.generation_stream import GenerationStream
from kvkeep.server.ollama.answers import NDJSON, AnswerFormat, ndjson_response
from kvkeep.server.ollama.request import (
    OLLAMA_RULES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
)
from kvkeep.server.service import ContextDep, RequestContext

router = body_router()


@router.post("/api/chat", response_model=None, responses=NDJSON)
async def chat(body: OllamaChatRequest, context: ContextDep) -> Response:
    """Generate the assistant's next message. Without messages, report that the model is loaded."""
    answer = AnswerFormat(context.service.model_name, context.tokenizer, in_message=True)
    OLLAMA_RULES.check(body, context.notices)
    if not body.messages:
        return _loaded_response(body, answer)
    prompt = await chat_input(context, body.chat, body.render_options())
    samplings = _options(body).samplings(context.default_sampling)
    request = _generation_request(body, prompt.ids, context)
    request = replace(request, written_tokens=prompt.written_tokens, title=prompt.title)
    prompt, samplings = await prompt.constrain(
        samplings, body.output_schema, reasoning_budget=body.reasoning_budget
    )
    stream = await start_generations(context, request, samplings, body.patience)
    reader = prompt.new_reader(stream.results[0])
    return await _response(body, context, answer, stream, reader)


@router.post("/api/generate", response_model=None, responses=NDJSON)
async def generate(body: OllamaGenerateRequest, context: ContextDep) -> Response:
    """Answer a prompt. Without a prompt, report that the model is loaded."""
    answer = AnswerFormat(context.service.model_name, context.tokenizer, in_message=False)
    OLLAMA_RULES.check(body, context.notices)
    if body.template:
        raise InvalidArgument(
            "template is not supported, as the model has its own: leave it out, or send the whole "
            "prompt with raw: true"
        )
    if not body.prompt and not body.suffix:
        return _loaded_response(body, answer)
    samplings = _options(body).samplings(context.default_sampling)
    if not body.raw and not body.suffix:
        prompt = await chat_input(context, body.chat, body.render_options())
        request = _generation_request(body, [*(body.context or ()), *prompt.ids], context)
        prompt, samplings = await prompt.constrain(
            samplings, body.output_schema, reasoning_budget=body.reasoning_budget
        )
        stream = await start_generations(context, request, samplings, body.patience)
        return await _response(body, context, answer, stream, prompt.new_reader())
    ids, end_tokens = await to_thread(_plain_prompt, body, context.tokenizer)
    request = replace(_generation_request(body, ids, context), end_tokens=end_tokens)
    samplings = await constrain(context, samplings, schema=body.output_schema)
    stream = await start_generations(context, request, samplings, body.patience)
    return await _response(body, context, answer, stream, None)


def _plain_prompt(
    body: OllamaGenerateRequest, tokenizer: TextCodec
) -> tuple[list[int], tuple[int, ...]]:
    """Return a prompt without a chat template, and the tokens that end its answer.

    With a suffix, the model fills in the middle. Raises UnsupportedModel if it cannot.
    """
    text = body.prompt or ""
    if body.suffix:
        fim = FillInMiddle.of(tokenizer)
        return fim.prompt(tokenizer, tokenizer.encode(text), body.suffix), fim.end_ids
    return [*(body.context or tokenizer.opening_ids), *tokenizer.encode(text, special=True)], ()


def _options(body: OllamaRequest) -> OllamaOptions:
    return body.options or OllamaOptions()


def _generation_request(
    body: OllamaRequest, ids: list[int], context: RequestContext
) -> GenerationRequest:
    max_tokens = context.service.max_tokens(_options(body).max_tokens)
    return GenerationRequest(
        tuple(ids),
        max_tokens,
        logprobs=body.requested_logprobs,
        **body.own_settings(context),
    )


def _loaded_response(body: OllamaRequest, answer: AnswerFormat) -> Response:
    """Return the answer to a request that only loads or unloads the model."""
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    return JSONResponse(answer.chunk(answer.empty(), done=True, done_reason=reason))


async def _response(
    body: OllamaRequest,
    context: RequestContext,
    answer: AnswerFormat,
    stream: GenerationStream,
    reader: OutputReader | None,
) -> Response:
    """Return the answer, whole or as a stream. reader: None for plain text."""
    if body.stream is not False:
        chunks = _chunks(stream, answer, reader)
        return ndjson_response(chunks, stream.aclose, answer.chunk(answer.empty()))
    (result,) = await context.collect(stream)
    read, parts = _part_reader(reader), list[Attributed]()
    for token in result.tokens:
        parts += read(token)
    parts += read(result.finished)
    fields = answer.content([part for part, _ in parts], text_tokens(parts)) or answer.empty()
    chunk = answer.last(fields, result.finished, **_context_field(stream, answer))
    return JSONResponse(chunk)


async def _chunks(
    stream: GenerationStream, answer: AnswerFormat, reader: OutputReader | None
) -> AsyncIterator[dict[str, Any]]:
    read = _part_reader(reader)
    async for _, event in stream:
        if isinstance(event, PrefillProgress):
            continue
        parts = read(event)
        if fields := answer.content([part for part, _ in parts], text_tokens(parts)):
            yield answer.chunk(fields)
        if isinstance(event, Finished):
            yield answer.last(answer.empty(), event, **_context_field(stream, answer))


def _part_reader(
    reader: OutputReader | None,
) -> Callable[[GeneratedToken | Finished], list[Attributed]]:
    """Return a function that reads the next event of an answer. reader: None for plain text."""
    return _plain_part if reader is None else AnswerTokens(reader).push


def _plain_part(event: GeneratedToken | Finished) -> list[Attributed]:
    tokens = [event] if isinstance(event, GeneratedToken) else []
    return [(TextDelta(event.text), tokens)] if event.text or tokens else []


def _context_field(stream: GenerationStream, answer: AnswerFormat) -> dict[str, Any]:
    """Return `context`, the tokens so far, which a next `/api/generate` can continue."""
    if answer.in_message:
        return {}
    (generation,) = stream.generations
    return {"context": [*generation.request.prompt, *generation.generated]}
