"""`/v1/completions`: the continuation of a text."""

import codecs
from asyncio import to_thread
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, TokenLogprob
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.generation import STREAM_PATIENCE, start_generations
from kvkeep.server.ignored_fields import COMPLETION_RULES
from kvkeep.server.openai import usage
from kvkeep.server.schemas import MAX_BATCH, MAX_TOKENS, CompletionParams, TokenId
from kvkeep.server.service import ContextDep, GenerationStream
from kvkeep.server.sse import DONE, JSON_OR_EVENTS, sse_event, sse_response

router = APIRouter()


class CompletionRequest(CompletionParams):
    """A request. prompt: a text, token ids, or a list of one of them."""

    prompt: str | list[TokenId] | Annotated[list[str | list[TokenId]], Field(max_length=1)]
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = 16
    n: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 1
    stream: bool = False
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    def encode_prompt(self, tokenizer: TextCodec) -> list[int]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return [*tokenizer.opening_ids, *tokenizer.encode(prompt)]
        return list(prompt)


@router.post("/v1/completions", response_model=None, responses=JSON_OR_EVENTS)
async def completions(body: CompletionRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Continue a prompt, in `n` choices."""
    COMPLETION_RULES.check(body, context.notices)
    tokenizer = context.tokenizer
    ids = await to_thread(body.encode_prompt, tokenizer)
    limit = context.service.max_tokens(body.max_tokens)
    request = GenerationRequest(
        tuple(ids), limit, ignore_eos=body.ignore_eos, logprobs=body.logprobs
    )
    samplings = body.samplings(context.default_sampling, body.n)
    patience = STREAM_PATIENCE if body.stream else None
    stream = await start_generations(context, request, samplings, patience)
    fields = {**usage.completion_fields("cmpl", context.service), "object": "text_completion"}
    echo_text = tokenizer.decode(ids) if body.echo else ""
    if body.stream:
        return sse_response(_stream_events(stream, fields, body, echo_text, tokenizer))
    choices, results = [], await context.collect(stream)
    for index, result in enumerate(results):
        logprobs = CompletionLogprobs(tokenizer, len(echo_text)).entry(result.tokens)
        choices.append(_choice(index, echo_text + result.text, result.finished, logprobs))
    return {**fields, "choices": choices, **usage.usage_and_timings(results)}


async def _stream_events(
    stream: GenerationStream,
    fields: dict[str, Any],
    body: CompletionRequest,
    echo_text: str,
    tokenizer: TextCodec,
) -> AsyncIterator[bytes]:
    logprobs = [CompletionLogprobs(tokenizer, len(echo_text)) for _ in range(body.n)]
    for index in range(body.n if echo_text else 0):
        yield sse_event({**fields, "choices": [_choice(index, echo_text)]})
    async for index, event in stream:
        if isinstance(event, Finished):
            yield sse_event({**fields, "choices": [_choice(index, event.text, event)]})
        elif isinstance(event, GeneratedToken) and (event.text or event.logprob):
            choice = _choice(index, event.text, logprobs=logprobs[index].entry([event]))
            yield sse_event({**fields, "choices": [choice]})
    if body.streams_usage:
        yield sse_event({**fields, "choices": [], "usage": usage.openai_usage(stream.results)})
    yield DONE


def _choice(
    index: int, text: str, finished: Finished | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = usage.FINISH_REASONS[finished.reason] if finished else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class CompletionLogprobs:
    """The log probabilities of one choice's tokens, in the form of completions.

    Offsets count characters of the choice's whole text, also in a stream. Tokens that share a
    character have the offset at which it begins.
    """

    def __init__(self, tokenizer: TextCodec, offset: int = 0):
        """offset: characters of the choice's text before its first token: those of an echo."""
        self._tokenizer, self._offset = tokenizer, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entry(self, sampled_tokens: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        """Return the choice's field `logprobs` for its next tokens; None if they have none."""
        logprobs = [event.logprob for event in sampled_tokens if event.logprob is not None]
        if not logprobs:
            return None
        return {
            "tokens": [self._token_text(token_logprob.token) for token_logprob in logprobs],
            "token_logprobs": [token_logprob.logprob for token_logprob in logprobs],
            "top_logprobs": [self._top_by_text(event.top_logprobs) for event in sampled_tokens],
            "text_offset": [self._advance_offset(event.token) for event in sampled_tokens],
        }

    def _top_by_text(self, top_logprobs: Sequence[TokenLogprob]) -> dict[str, float]:
        """Map texts to log probabilities; a text that is taken is replaced by the token's id."""
        logprobs_by_text: dict[str, float] = {}
        for top in top_logprobs:
            text = self._token_text(top.token)
            text = f"token_id:{top.token}" if text in logprobs_by_text else text
            logprobs_by_text[text] = top.logprob
        return logprobs_by_text

    def _token_text(self, token: int) -> str:
        token_bytes = self._tokenizer.token_bytes(token)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return f"bytes:{token_bytes.decode(errors='backslashreplace')}"

    def _advance_offset(self, token: int) -> int:
        """Return the token's offset, and move on to that of the next token."""
        offset = self._offset
        if not self._tokenizer.is_control(token):  # control tokens are not part of the text
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offset
