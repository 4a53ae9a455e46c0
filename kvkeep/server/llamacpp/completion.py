"""`/completion`: llama.cpp's native completion endpoint."""

from asyncio import to_thread
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.alignment import OwnFields, own_fields
from kvkeep.server.body_route import body_router
from kvkeep.server.generation import STREAM_PATIENCE, constrain, start_generations
from kvkeep.server.generation_stream import GenerationResult, GenerationStream
from kvkeep.server.ignored_fields import LLAMACPP_RULES
from kvkeep.server.limits import (
    MAX_BATCH,
    MAX_BIASES,
    MAX_TOKEN_IDS,
    MAX_TOKENS,
    Bias,
    Biases,
    Blocks,
    Data,
    GrammarText,
    LongText,
    Options,
    ShortText,
    TokenId,
)
from kvkeep.server.llamacpp.auxiliary import NUM_SLOTS, slot_session_name
from kvkeep.server.openai.usage import llamacpp_progress, llamacpp_timings, logprobs_entry
from kvkeep.server.overflow import check_prompt_size
from kvkeep.server.schemas import RequestBody, SamplingParams
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response

router = body_router()
_STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "full": "limit"}
_MISSING = object()


class PromptObject(RequestBody):
    """A prompt as an object. Multimodal data is refused."""

    prompt_string: LongText
    multimodal_data: Blocks | LongText | None = None


_Prompt = (
    LongText | PromptObject | Annotated[list[TokenId | LongText], Field(max_length=MAX_TOKEN_IDS)]
)

_BiasPair = tuple[TokenId | ShortText, Bias | Literal[False]]
_Biases = Biases | Annotated[list[_BiasPair], Field(max_length=MAX_BIASES)] | None


class LlamaCompletionRequest(SamplingParams, OwnFields):
    """A request.

    prompt: a text, token ids, or a list that mixes both; or a list of prompts, each of which gets
    its own completion. n_predict: -1 for no limit. response_fields: the fields of the
    response, "a/b" for b in a. logit_bias: texts bias each of their tokens.
    """

    prompt: _Prompt | Annotated[list[_Prompt], Field(max_length=MAX_BATCH)]
    n_predict: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = -1
    stream: bool = False
    n_probs: Annotated[int, Field(ge=0, le=100)] = 0
    ignore_eos: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    id_slot: Annotated[int, Field(ge=-1, lt=NUM_SLOTS)] = -1
    response_fields: Options = Field(default_factory=list)
    json_schema: Data | None = None
    grammar: GrammarText | None = None
    logit_bias: _Biases = None  # type: ignore[assignment]

    @property
    def has_many_prompts(self) -> bool:
        """Whether `prompt` is several prompts; a list with any token id in it is one prompt."""
        prompt = self.prompt
        return isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Take null for the default, as llama.cpp does."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _require_few_prompts(self) -> "LlamaCompletionRequest":
        """Refuse a list of too many texts, which is as valid as a mixed list for one prompt."""
        prompts = self.prompt if isinstance(self.prompt, list) else []
        if self.has_many_prompts and len(prompts) > MAX_BATCH:
            raise ValueError(f"prompt can have at most {MAX_BATCH} prompts; found {len(prompts)}")
        return self

    def encode_prompts(self, tokenizer: TextCodec, context_size: int) -> list[list[int]]:
        """Return the token ids of each prompt. context_size: for those that are made to fit."""
        prompts: Any = self.prompt if self.has_many_prompts else [self.prompt]
        return [_encode_prompt(prompt, tokenizer) for prompt in prompts]

    def end_tokens(self, tokenizer: TextCodec) -> tuple[int, ...]:
        """Return tokens, beside the model's end tokens, that end the generation."""
        return ()

    def with_encoded_bias(self, tokenizer: TextCodec) -> "LlamaCompletionRequest":
        """Return a copy with the texts in `logit_bias` replaced by their tokens."""
        biases = self.logit_bias
        items = biases.items() if isinstance(biases, dict) else biases or ()
        pairs = [(token, bias) for key, bias in items for token in _bias_tokens(key, tokenizer)]
        return self.model_copy(update={"logit_bias": pairs})


def _encode_prompt(prompt: _Prompt, tokenizer: TextCodec) -> list[int]:
    if isinstance(prompt, PromptObject):
        if prompt.multimodal_data:
            raise InvalidArgument("multimodal_data: the model supports text only")
        prompt = prompt.prompt_string
    if isinstance(prompt, str):
        return [*tokenizer.opening_ids, *tokenizer.encode(prompt, special=True)]
    ids: list[int] = []
    for part in prompt:
        ids += tokenizer.encode(part, special=True) if isinstance(part, str) else [part]
    return ids


def _bias_tokens(key: int | str, tokenizer: TextCodec) -> list[int]:
    """Return the tokens that an entry of `logit_bias` biases. key: a token id or a text."""
    if isinstance(key, int):
        return [key]
    if key.isascii() and key.isdigit():  # a token id, as OpenAI's clients write it
        return [int(key)]
    return tokenizer.encode(key)


@router.post("/completion", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/completions", response_model=None, include_in_schema=False)
async def completion(
    body: LlamaCompletionRequest, context: ContextDep
) -> Response | dict[str, Any] | list[dict[str, Any]]:
    """Complete a prompt, or each of several."""
    return await complete(body, context)


async def complete(
    body: LlamaCompletionRequest, context: RequestContext
) -> Response | dict[str, Any] | list[dict[str, Any]]:
    """Return the response to a request."""
    LLAMACPP_RULES.check(body, context.notices)
    context_size = context.service.context_size
    prompts = await to_thread(body.encode_prompts, context.tokenizer, context_size)
    if not all(prompts):
        raise InvalidArgument("the prompt is empty")
    body = body.with_encoded_bias(context.tokenizer)
    if body.has_many_prompts and (body.stream or body.id_slot >= 0):
        raise InvalidArgument("stream and id_slot need a single prompt")
    outputs = [_LlamaOutput(body, ids, context, index) for index, ids in enumerate(prompts)]
    streams = list[GenerationStream]()
    try:
        for ids in prompts:
            streams.append(await _start(body, ids, context))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    if body.stream:
        return sse_response(outputs[0].events(streams[0]), streams[0].aclose)
    results = await context.collect(*streams)
    responses = [output.response(result) for output, result in zip(outputs, results, strict=True)]
    return responses if body.has_many_prompts else responses[0]


async def _start(
    body: LlamaCompletionRequest, ids: list[int], context: RequestContext
) -> GenerationStream:
    """Submit a prompt, in the session of its slot if it has one."""
    samplings = body.samplings(context.default_sampling)
    (sampling,) = await constrain(context, samplings, body.json_schema, body.grammar)
    max_tokens = context.service.max_tokens(None if body.n_predict < 0 else body.n_predict)
    logprobs = body.n_probs or None
    request = GenerationRequest(tuple(ids), max_tokens, sampling, body.ignore_eos, logprobs)
    request = replace(
        request,
        end_tokens=body.end_tokens(context.tokenizer),
        **body.own_settings(context),
    )
    if body.id_slot < 0:
        patience = STREAM_PATIENCE if body.stream else None
        return await start_generations(context, request, [sampling], patience)
    check_prompt_size(context, len(ids), min(1, max_tokens))
    request = replace(request, whole_text=True)
    return await context.generate(request, slot_session_name(body.id_slot))


@dataclass(frozen=True)
class _LlamaOutput:
    """Formats the generation of one prompt as a response, or as events of a stream."""

    body: LlamaCompletionRequest
    prompt_ids: list[int]
    context: RequestContext
    prompt_index: int  # in the request

    def response(self, result: GenerationResult) -> dict[str, Any]:
        content_fields = self._content_fields(result.text, result.tokens)
        content_fields["has_new_line"] = "\n" in result.text
        fields = {**self._final_fields(result.finished), **content_fields}
        return _select_fields(fields, self.body.response_fields)

    async def events(self, stream: GenerationStream) -> AsyncIterator[bytes]:
        async for _, event in stream:
            if isinstance(event, Finished):
                content_fields = self._content_fields(event.text, [])
                yield sse_event({**self._final_fields(event), **content_fields})
            elif isinstance(event, GeneratedToken):
                content_fields = self._content_fields(event.text, [event])
                yield sse_event({"index": self.prompt_index, **content_fields, "stop": False})
            elif self.body.return_progress:
                progress_field = {"prompt_progress": llamacpp_progress(event)}
                yield sse_event({**progress_field, "content": "", "stop": False})

    def _content_fields(self, text: str, sampled_tokens: list[GeneratedToken]) -> dict[str, Any]:
        include_tokens = self.body.return_tokens or self.body.stream
        tokens = [event.token for event in sampled_tokens] if include_tokens else []
        fields: dict[str, Any] = {"content": text, "tokens": tokens}
        if self.body.n_probs:  # partial characters are dropped, as in llama.cpp
            tokenizer = self.context.tokenizer
            probabilities = [logprobs_entry(tokenizer, event, "ignore") for event in sampled_tokens]
            fields["completion_probabilities"] = probabilities
        return fields

    def _final_fields(self, finished: Finished) -> dict[str, Any]:
        usage, body = finished.usage, self.body
        others = {*OwnFields.model_fields, "repetition_penalty"}  # not llama.cpp's
        own = others - body.model_fields_set
        settings = body.model_dump(exclude={"prompt", *own, *(body.model_extra or {})})
        cached_tokens = usage.reuse.tokens
        return {
            "index": self.prompt_index,
            "id_slot": body.id_slot,
            "stop": True,
            "model": self.context.service.model_name,
            "tokens_predicted": usage.generated,
            "tokens_evaluated": len(self.prompt_ids),
            "tokens_cached": cached_tokens,
            "generation_settings": settings,
            "prompt": self.context.tokenizer.decode(self.prompt_ids),
            "truncated": finished.reason == "full" or usage.evicted > 0,
            **own_fields(usage),
            "stop_type": _STOP_TYPES[finished.reason],
            "stopping_word": finished.stop or "",
            "timings": {**llamacpp_timings(usage), "cache_n": cached_tokens},
        }


def _select_fields(response: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """Return the fields at the paths, such as "a/b" for b in a; all fields if there are none."""
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = response
        for field in path.split("/"):
            value = value.get(field, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            selected[path] = value
    return selected if paths else response
