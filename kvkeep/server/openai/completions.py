"""`/v1/completions`: the continuation of a text, or what belongs between two texts."""

from asyncio import to_thread
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.fill_in_middle import FillInMiddle
from kvkeep.server.alignment import OwnFields, own_fields
from kvkeep.server.body_route import body_router
from kvkeep.server.generation import STREAM_PATIENCE, start_batch
from kvkeep.server.generation_stream import GenerationResult, GenerationStream
from kvkeep.server.ignored_fields import COMPLETION_RULES
from kvkeep.server.limits import MAX_BATCH, MAX_TOKENS, LongText, TokenIds
from kvkeep.server.openai import usage
from kvkeep.server.openai.completion_logprobs import (
    CompletionLogprobs,
    EncodedPrompt,
    joined_entries,
)
from kvkeep.server.schemas import CompletionParams
from kvkeep.server.service import ContextDep
from kvkeep.server.sse import DONE, JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.session.scoring import TokenScores

router = body_router()
_DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
_Count = Annotated[int | None, Field(ge=1, le=MAX_BATCH)]


class CompletionRequest(CompletionParams, OwnFields):
    """A request.

    prompt: a text, token ids, or a list of texts and lists of token ids, each of which gets `n`
    choices. max_tokens, or n_predict: -1 for no limit. suffix: what comes after the generated text,
    for models that can fill in the middle. best_of: choices to generate; the `n` with the highest
    mean log probability are returned. echo: begin each choice with its prompt, also in `logprobs`.
    """

    prompt: LongText | TokenIds | Annotated[list[LongText | TokenIds], Field(max_length=MAX_BATCH)]
    suffix: LongText | None = None
    max_tokens: Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)] = _DEFAULT_MAX_TOKENS
    n_predict: Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)] = None
    n: _Count = None
    best_of: _Count = None
    stream: bool | None = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @property
    def choice_count(self) -> int:
        """The choices of one prompt that are returned."""
        return self.n or 1

    @property
    def sample_count(self) -> int:
        """The choices of one prompt that are generated."""
        return self.best_of or self.choice_count

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None for no limit."""
        limit = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.n_predict is not None and "max_tokens" not in self.model_fields_set:
            limit = self.n_predict
        return None if limit < 0 else limit

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt. Raises InvalidArgument for fields that exclude each other."""
        prompt: Any = self.prompt
        is_single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        prompts = [prompt] if is_single else prompt
        if self.sample_count < self.choice_count:
            raise InvalidArgument(
                f"best_of must be n or more: found best_of {self.best_of} and n {self.n}"
            )
        if self.stream and self.sample_count > self.choice_count:
            raise InvalidArgument("best_of greater than n cannot be streamed: leave stream out")
        if self.echo and self.suffix:
            raise InvalidArgument("echo and suffix cannot be combined: leave one of them out")
        if len(prompts) * self.sample_count > MAX_BATCH:
            raise InvalidArgument(
                f"a request can generate at most {MAX_BATCH} choices; found {len(prompts)} prompts "
                f"with {self.sample_count} each: send several requests"
            )
        return prompts

    def encode_prompts(self, tokenizer: TextCodec) -> list[EncodedPrompt]:
        """Encode each prompt.

        Raises InvalidArgument for an empty one, UnsupportedModel for a suffix that the model cannot
        take.
        """
        prompts = [EncodedPrompt.of(prompt, tokenizer) for prompt in self.prompts()]
        if not self.suffix:
            if not all(prompt.ids for prompt in prompts):
                raise InvalidArgument("a prompt is empty: send a text or token ids")
            return prompts
        fim, result = FillInMiddle.of(tokenizer), []
        for given, prompt in zip(self.prompts(), prompts, strict=True):
            opening = len(tokenizer.opening_ids) if isinstance(given, str) else 0
            ids = fim.prompt(tokenizer, prompt.ids[opening:], self.suffix)
            result.append(EncodedPrompt(ids, "", ()))
        return result

    def generation_requests(
        self, prompts: Sequence[EncodedPrompt], tokenizer: TextCodec, max_tokens: int
    ) -> list[GenerationRequest]:
        logprobs = self.logprobs
        if logprobs is None and self.sample_count > self.choice_count:
            logprobs = 0  # to choose by
        return [
            GenerationRequest(
                tuple(prompt.ids),
                max_tokens,
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=self.logprobs if self.echo else None,
                end_tokens=FillInMiddle.of(tokenizer).end_ids if self.suffix else (),
            )
            for prompt in prompts
        ]


@router.post("/v1/completions", response_model=None, responses=JSON_OR_EVENTS)
async def completions(body: CompletionRequest, context: ContextDep) -> Response:
    """Continue prompts, each in `n` choices."""
    COMPLETION_RULES.check(body, context.notices)
    tokenizer, service = context.tokenizer, context.service
    prompts = await to_thread(body.encode_prompts, tokenizer)
    limit = service.max_tokens(body.token_limit)
    requests = [
        replace(request, **body.own_settings(context))
        for request in body.generation_requests(prompts, tokenizer, limit)
    ]
    samplings = body.samplings(context.default_sampling, body.sample_count)
    patience = STREAM_PATIENCE if body.stream else None
    stream = await start_batch(context, requests, samplings, patience)
    fields = {**usage.completion_fields("cmpl", service), "object": "text_completion"}
    output = _CompletionOutput(body, prompts, tokenizer, fields)
    if body.stream:
        return sse_response(output.events(stream), stream.aclose)
    # In a thread: an echoed prompt may have the log probabilities of tens of thousands of tokens.
    return await to_thread(output.response, await context.collect(stream))


@dataclass(frozen=True)
class _CompletionOutput:
    """The choices of a response, whole or in chunks."""

    body: CompletionRequest
    prompts: list[EncodedPrompt]
    tokenizer: TextCodec
    fields: dict[str, Any]  # of every chunk

    def response(self, results: Sequence[GenerationResult]) -> JSONResponse:
        """Return the whole response. results: of all prompts, in their order."""
        by_prompt = self._by_prompt(results)
        choices: list[dict[str, Any]] = []
        for prompt, candidates in zip(self.prompts, by_prompt, strict=True):
            best = sorted(candidates, key=_mean_logprob, reverse=True)
            kept = best if self.body.best_of else candidates
            for result in kept[: self.body.choice_count]:
                choices.append(self._choice(len(choices), prompt, result, candidates[0]))
        usages = [result.finished.usage for result in results]
        counts = {"usage": usage.total_usage(by_prompt), **own_fields(*usages)}
        timings = usage.llamacpp_timings(usages[0])
        return JSONResponse({**self.fields, "choices": choices, **counts, "timings": timings})

    def _choice(
        self, index: int, prompt: EncodedPrompt, result: GenerationResult, first: GenerationResult
    ) -> dict[str, Any]:
        """Return a choice. first: the prompt's first result, which has the prompt's scores."""
        text, logprobs, echo = result.text, None, None
        offset = len(prompt.text) if self.body.echo else 0
        formatter = CompletionLogprobs(self.tokenizer, offset)
        if self.body.logprobs is not None:
            echo = formatter.prompt_entry(prompt, first.prompt_scores) if self.body.echo else None
            logprobs = joined_entries(echo, formatter.entry(result.sampled_tokens))
        if self.body.echo:
            text = prompt.text + text
        return _choice(index, text, result.finished, logprobs)

    async def events(self, stream: GenerationStream) -> AsyncIterator[bytes]:
        body, count, prompts = self.body, self.body.choice_count, self.prompts
        offsets = [len(prompt.text) if body.echo else 0 for prompt in prompts]
        formatters = [
            CompletionLogprobs(self.tokenizer, offset) for offset in offsets for _ in range(count)
        ]
        not_echoed = set(range(len(formatters))) if body.echo else set[int]()
        async for index, event in stream:
            if not isinstance(event, (Finished, GeneratedToken)):
                continue
            formatter, prompt = formatters[index], prompts[index // count]
            if index in not_echoed:
                not_echoed.remove(index)
                scores = stream.results[index // count * count].prompt_scores
                yield await to_thread(self._echo_event, index, formatter, prompt, scores)
            if isinstance(event, Finished):
                end_token = [event.end_token] if event.end_token else []
                choice = _choice(index, event.text, event, formatter.entry(end_token))
                yield self._event(choice, **own_fields(event.usage))
            elif event.text or event.logprob:
                logprobs = formatter.entry([event])
                yield self._event(_choice(index, event.text, logprobs=logprobs))
        if body.streams_usage:
            total = usage.total_usage(self._by_prompt(stream.results))
            yield sse_event({**self.fields, "choices": [], "usage": total})
        yield DONE

    def _echo_event(
        self,
        index: int,
        formatter: CompletionLogprobs,
        prompt: EncodedPrompt,
        scores: Sequence[TokenScores],
    ) -> bytes:
        """Return the chunk that repeats a choice's prompt."""
        has_logprobs = self.body.logprobs is not None
        logprobs = formatter.prompt_entry(prompt, scores) if has_logprobs else None
        return self._event(_choice(index, prompt.text, logprobs=logprobs))

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        return sse_event({**self.fields, "choices": [choice], **more})

    def _by_prompt(self, results: Sequence[GenerationResult]) -> list[Sequence[GenerationResult]]:
        count = self.body.sample_count
        return [results[first : first + count] for first in range(0, len(results), count)]


def _mean_logprob(result: GenerationResult) -> float:
    logprobs = [event.logprob.logprob for event in result.sampled_tokens if event.logprob]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _choice(
    index: int, text: str, finished: Finished | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    reason = usage.FINISH_REASONS[finished.reason] if finished else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
