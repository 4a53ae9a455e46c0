"""`/v1/completions`: text that goes on from a text."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, Usage
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.errors import problem_of
from kvkeep.server.health import now
from kvkeep.server.openai.chat import asked, longest
from kvkeep.server.openai.logprobs import CompletionLogprobs
from kvkeep.server.openai.usage import REASONS, timings_of, usage_of
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_ANSWERS, MOST_TOKENS, Body, Choosing, Owner, Serving
from kvkeep.server.service import Running, Service
from kvkeep.server.sse import DONE, event, stream

router = APIRouter()
_Id = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Body):
    include_usage: bool = False


class Completion(Choosing):
    """A request. prompt: a text or token ids; a list of one of them is taken, too."""

    prompt: str | list[_Id] | Annotated[list[str | list[_Id]], Field(max_length=1)]
    max_tokens: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = 16
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    ignore_eos: bool = False


@router.post("/v1/completions", response_model=None, responses=STREAMED)
async def completions(
    body: Completion, request: HttpRequest, service: Serving, owner: Owner
) -> Response | dict[str, Any]:
    """Goes on from a prompt, in `n` ways."""
    ids = await asyncio.to_thread(_ids, service, body.prompt)
    ask = GenerationRequest(
        tuple(ids),
        longest(service, body.max_tokens),
        ignore_eos=body.ignore_eos,
        logprobs=body.logprobs,
    )
    running = await asked(service, ask, owner, body.samplings(body.n))
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": now(), "model": service.name}
    head["object"] = "text_completion"
    echoed = service.model.text.decode(ids) if body.echo else ""
    if body.stream:
        return stream(_streamed(running, head, body, echoed, service.model.text))
    async with running.until_gone(request):
        return await _whole(running, head, body, echoed, service.model.text)


def _ids(service: Service, prompt: Any) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    text = service.model.text
    return [*text.opening_ids, *text.encode(prompt)] if isinstance(prompt, str) else list(prompt)


async def _whole(
    running: Running, head: dict[str, Any], body: Completion, echoed: str, codec: TextCodec
) -> dict[str, Any]:
    texts, ends = [echoed] * body.n, dict[int, Finished]()
    written: list[list[GeneratedToken]] = [[] for _ in texts]
    async for index, each in running:
        if isinstance(each, GeneratedToken):
            written[index].append(each)
        if isinstance(each, (GeneratedToken, Finished)):
            texts[index] += each.text
        if isinstance(each, Finished):
            ends[index] = each
    choices = [
        _choice(
            index,
            texts[index],
            ends[index],
            CompletionLogprobs(codec, len(echoed)).entry(written[index]),
        )
        for index in range(body.n)
    ]
    usages = [ends[index].usage for index in range(body.n)]
    return {**head, "choices": choices, "usage": usage_of(usages), "timings": timings_of(usages[0])}


async def _streamed(
    running: Running, head: dict[str, Any], body: Completion, echoed: str, codec: TextCodec
) -> AsyncIterator[bytes]:
    usages: list[Usage] = []
    logprobs = [CompletionLogprobs(codec, len(echoed)) for _ in range(body.n)]
    try:
        for index in range(body.n if echoed else 0):
            yield event({**head, "choices": [_choice(index, echoed, None)]})
        async for index, each in running:
            if isinstance(each, Finished):
                usages.append(each.usage)
                yield event({**head, "choices": [_choice(index, each.text, each)]})
            elif isinstance(each, GeneratedToken) and (each.text or each.logprob):
                likely = logprobs[index].entry([each])
                yield event({**head, "choices": [_choice(index, each.text, None, likely)]})
        if body.stream_options and body.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage_of(usages)})
        yield DONE
    except Exception as error:  # the status is sent: what happened is the last event
        yield event(problem_of(error).body())


def _choice(
    index: int, text: str, end: Finished | None, likely: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = None if end is None else REASONS[end.reason]
    return {"index": index, "text": text, "logprobs": likely, "finish_reason": reason}
