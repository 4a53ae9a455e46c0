"""`/v1/completions`: the continuation of a text."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, Usage
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.errors import api_error_for
from kvkeep.server.generation import start_generations
from kvkeep.server.openai.usage import (
    FINISH_REASONS,
    CompletionLogprobs,
    llamacpp_timings,
    openai_usage,
)
from kvkeep.server.schemas import (
    MAX_GENERATIONS,
    MAX_TOKENS,
    OwnerDep,
    SamplingParams,
    ServiceDep,
    StreamOptions,
    TokenId,
)
from kvkeep.server.service import GenerationResult, GenerationStream, Service
from kvkeep.server.sse import DONE, JSON_OR_EVENTS, sse_event, sse_response

router = APIRouter()


class CompletionRequest(SamplingParams):
    """A request. prompt: a text, token ids, or a list of one of them."""

    prompt: str | list[TokenId] | Annotated[list[str | list[TokenId]], Field(max_length=1)]
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = 16
    n: Annotated[int, Field(ge=1, le=MAX_GENERATIONS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    ignore_eos: bool = False


@router.post("/v1/completions", response_model=None, responses=JSON_OR_EVENTS)
async def completions(
    body: CompletionRequest, http_request: HttpRequest, service: ServiceDep, owner: OwnerDep
) -> Response | dict[str, Any]:
    """Continue a prompt, in `n` choices."""
    ids, codec = await asyncio.to_thread(_prompt_ids, service, body.prompt), service.model.text
    limit = service.max_tokens(body.max_tokens)
    request = GenerationRequest(
        tuple(ids), limit, ignore_eos=body.ignore_eos, logprobs=body.logprobs
    )
    generations = await start_generations(service, request, owner, body.samplings(body.n))
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": service.name,
        "object": "text_completion",
    }
    echo = codec.decode(ids) if body.echo else ""
    if body.stream:
        return sse_response(_stream(generations, head, body, echo, codec))
    async with generations.cancel_on_disconnect(http_request):
        return _completion(head, await generations.collect(), echo, codec)


def _prompt_ids(service: Service, prompt: Any) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    text = service.model.text
    return [*text.opening_ids, *text.encode(prompt)] if isinstance(prompt, str) else list(prompt)


def _completion(
    head: dict[str, Any], results: list[GenerationResult], echo: str, codec: TextCodec
) -> dict[str, Any]:
    choices = []
    for index, result in enumerate(results):
        logprobs = CompletionLogprobs(codec, len(echo)).entry(result.tokens)
        choices.append(_choice(index, echo + result.text, result.end, logprobs))
    usages = [result.end.usage for result in results]
    totals = {"usage": openai_usage(usages), "timings": llamacpp_timings(usages[0])}
    return {**head, "choices": choices, **totals}


async def _stream(
    generations: GenerationStream,
    head: dict[str, Any],
    body: CompletionRequest,
    echo: str,
    codec: TextCodec,
) -> AsyncIterator[bytes]:
    usages: list[Usage] = []
    logprobs = [CompletionLogprobs(codec, len(echo)) for _ in range(body.n)]
    try:
        for index in range(body.n if echo else 0):
            yield sse_event({**head, "choices": [_choice(index, echo, None)]})
        async for index, progress in generations:
            if isinstance(progress, Finished):
                usages.append(progress.usage)
                choice = _choice(index, progress.text, progress)
                yield sse_event({**head, "choices": [choice]})
            elif isinstance(progress, GeneratedToken) and (progress.text or progress.logprob):
                entry = logprobs[index].entry([progress])
                choice = _choice(index, progress.text, None, entry)
                yield sse_event({**head, "choices": [choice]})
        if body.stream_options and body.stream_options.include_usage:
            yield sse_event({**head, "choices": [], "usage": openai_usage(usages)})
        yield DONE
    except Exception as error:  # the status is already sent: the last event reports the error
        yield sse_event(api_error_for(error).openai_body())


def _choice(
    index: int, text: str, end: Finished | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = None if end is None else FINISH_REASONS[end.reason]
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
