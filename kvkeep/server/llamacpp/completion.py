"""`/completion`, and sessions as slots: what clients of llama.cpp's server know."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress, TokenLogprob
from kvkeep.errors import InvalidArgument
from kvkeep.server.errors import problem_of
from kvkeep.server.llamacpp.text import DEFAULTS, SLOTS, slot_name
from kvkeep.server.openai.chat import asked, forced_by
from kvkeep.server.openai.usage import progress_of, timings_of
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_ANSWERS, MOST_TOKENS, Bias, Body, Choosing, Owner, Serving
from kvkeep.server.service import Running, Service
from kvkeep.server.sse import event, stream

router = APIRouter()
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_STOPS = {"eos": "eos", "stop": "word", "length": "limit", "full": "limit"}
_NOT_THERE = object()


class Json(Body):
    """A prompt as an object. Pictures and sounds are refused: models are of text here."""

    prompt_string: str
    multimodal_data: list[Any] | str | None = None


_Part = _Id | str
_One = str | Json | Annotated[list[_Part], Field(max_length=1_000_000)]


class Completion(Choosing):
    """A request.

    prompt: a text, token ids, both in one list; or a list of texts, or of any of these, each of
    which has an answer. n_predict: -1 for no end. response_fields: which parts of the answer are
    wanted; "a/b" for b in a. logit_bias: also of each token of a text.
    """

    prompt: _One | Annotated[list[_One], Field(max_length=MOST_ANSWERS)]
    n_predict: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] = -1
    stream: bool = False
    n_probs: Annotated[int, Field(ge=0, le=100)] = 0
    ignore_eos: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    id_slot: Annotated[int, Field(ge=-1, lt=SLOTS)] = -1
    response_fields: tuple[str, ...] = ()
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    logit_bias: dict[str, Bias] | list[tuple[int | str, Bias | Literal[False]]] | None = None  # type: ignore[assignment]

    @property
    def many(self) -> bool:
        """Whether there are several prompts: numbers beside texts are one."""
        if not isinstance(self.prompt, list):
            return False
        return not any(isinstance(part, int) for part in self.prompt)

    def all_ids(self, service: Service) -> list[list[int]]:
        """The tokens of each prompt."""
        prompts: list[Any] = list(self.prompt) if self.many else [self.prompt]
        return [_ids(prompt, service) for prompt in prompts]

    def biased(self, service: Service) -> "Completion":
        """The same with texts of biases as their tokens."""
        given = self.logit_bias
        pairs = given.items() if isinstance(given, dict) else given or ()
        found = [(token, bias) for text, bias in pairs for token in _tokens_of(text, service)]
        return self.model_copy(update={"logit_bias": found})


def _ids(prompt: _One, service: Service) -> list[int]:
    text = service.model.text
    if isinstance(prompt, Json):
        if prompt.multimodal_data:
            raise InvalidArgument("multimodal_data: the model is of text alone")
        prompt = prompt.prompt_string
    if isinstance(prompt, str):
        return [*text.opening_ids, *text.encode(prompt, special=True)]
    ids: list[int] = []
    for part in prompt:
        ids += text.encode(part, special=True) if isinstance(part, str) else [part]
    return ids


def _tokens_of(text: int | str, service: Service) -> list[int]:
    if isinstance(text, int):
        return [text]
    if text.isascii() and text.isdigit():  # OpenAI's way to write an id
        return [int(text)]
    return service.model.text.encode(text)


@router.post("/completion", response_model=None, responses=STREAMED)
@router.post("/completions", response_model=None, include_in_schema=False)
async def completion(
    body: Completion, request: HttpRequest, service: Serving, owner: Owner
) -> Response | dict[str, Any] | list[dict[str, Any]]:
    """Goes on from a prompt, or from each of several."""
    prompts = await asyncio.to_thread(body.all_ids, service)
    if not all(prompts):
        raise InvalidArgument("the prompt is empty")
    body = body.biased(service)
    if body.many:
        return await _each(body, prompts, request, service, owner)
    (ids,) = prompts
    running = await _running(body, ids, service, owner)
    reply = _Reply(body, ids, service)
    if body.stream:
        return stream(reply.streamed(running))
    async with running.until_gone(request):
        return await reply.whole(running)


async def _each(
    body: Completion,
    prompts: list[list[int]],
    request: HttpRequest,
    service: Service,
    owner: str,
) -> list[dict[str, Any]]:
    """An answer to each prompt; all are written together."""
    if body.stream or body.id_slot >= 0:
        raise InvalidArgument("a stream, or a slot, is of one prompt")
    answers = list[Running]()
    try:
        for ids in prompts:
            answers.append(await _running(body, ids, service, owner))
        replies = [_Reply(body, ids, service, index) for index, ids in enumerate(prompts)]
        whole = [reply.whole(running) for reply, running in zip(replies, answers, strict=True)]
        async with _all_of(answers).until_gone(request):
            return await asyncio.gather(*whole)
    finally:
        for running in answers:
            running.cancel()


def _all_of(answers: list[Running]) -> Running:
    """For who cancels them."""
    every = Running(asyncio.get_running_loop())
    every.answers = [answer for running in answers for answer in running.answers]
    return every


async def _running(body: Completion, ids: list[int], service: Service, owner: str) -> Running:
    chosen = body.model_copy(update=_unsaid(body)).samplings()
    (sampling,) = forced_by(service, chosen, None, body.json_schema, body.grammar)
    most = service.model.spec.max_positions if body.n_predict < 0 else body.n_predict
    likely = body.n_probs or None
    ask = GenerationRequest(tuple(ids), most, sampling, body.ignore_eos, likely)
    if body.id_slot < 0:
        return await asked(service, ask, owner, [sampling])
    name = slot_name(body.id_slot)
    held = await asyncio.wrap_future(service.engine.prepare(ids, name, owner))
    rest = GenerationRequest(tuple(ids[held:]), most, sampling, body.ignore_eos, likely)
    return await service.answers(rest, owner, session=name)


def _unsaid(body: Completion) -> dict[str, float]:
    """What llama.cpp takes where a request does not say."""
    return {name: value for name, value in DEFAULTS.items() if getattr(body, name) is None}


class _Reply:
    """An answer, made into what a client of llama.cpp reads. index: of its prompt."""

    def __init__(self, body: Completion, ids: list[int], service: Service, index: int = 0):
        self._body, self._ids, self._service, self._index = body, ids, service, index

    async def whole(self, running: Running) -> dict[str, Any]:
        text, written, end = "", list[GeneratedToken](), None
        async for _, each in running:
            if isinstance(each, GeneratedToken):
                written.append(each)
            if isinstance(each, (GeneratedToken, Finished)):
                text += each.text
            end = each
        assert isinstance(end, Finished)
        whole = {**self._end(end), **self._said(text, written), "has_new_line": "\n" in text}
        return _chosen(whole, self._body.response_fields)

    async def streamed(self, running: Running) -> AsyncIterator[bytes]:
        try:
            async for _, each in running:
                if isinstance(each, PrefillProgress) and self._body.return_progress:
                    said = {"prompt_progress": progress_of(each), "content": "", "stop": False}
                    yield event(said)
                elif isinstance(each, GeneratedToken):
                    yield event(
                        {"index": self._index, **self._said(each.text, [each]), "stop": False}
                    )
                elif isinstance(each, Finished):
                    yield event({**self._end(each), **self._said(each.text, [])})
        except Exception as error:  # the status is sent: what happened is the last event
            yield event(problem_of(error).body())

    def _said(self, text: str, written: list[GeneratedToken]) -> dict[str, Any]:
        tokens = [each.token for each in written]
        given = self._body.return_tokens or self._body.stream
        said: dict[str, Any] = {"content": text, "tokens": tokens if given else []}
        if self._body.n_probs:
            said["completion_probabilities"] = [self._likely(each) for each in written]
        return said

    def _likely(self, each: GeneratedToken) -> dict[str, Any]:
        assert each.logprob is not None
        top = [self._entry(one) for one in each.top_logprobs]
        return {**self._entry(each.logprob), "top_logprobs": top}

    def _entry(self, likely: TokenLogprob) -> dict[str, Any]:
        raw = self._service.model.text.token_bytes(likely.token)
        return {
            "id": likely.token,
            "token": raw.decode(errors="ignore"),  # as llama.cpp: without a part of a character
            "bytes": list(raw),
            "logprob": likely.logprob,
        }

    def _end(self, end: Finished) -> dict[str, Any]:
        usage, body = end.usage, self._body
        settings = body.model_dump(exclude={"prompt", *(body.model_extra or {})})
        cached = usage.reuse.tokens + len(self._ids) - usage.prompt
        return {
            "index": self._index,
            "id_slot": body.id_slot,
            "stop": True,
            "model": self._service.name,
            "tokens_predicted": usage.generated,
            "tokens_evaluated": len(self._ids),
            "tokens_cached": cached,
            "generation_settings": settings,
            "prompt": self._service.model.text.decode(self._ids),
            "truncated": end.reason == "full",
            "stop_type": _STOPS[end.reason],
            "stopping_word": end.stop or "",
            "timings": {**timings_of(usage), "cache_n": cached},
        }


def _chosen(whole: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The parts that are wanted; all where none is named."""
    found: dict[str, Any] = {}
    for name in fields:
        part: Any = whole
        for step in name.split("/"):
            part = part.get(step, _NOT_THERE) if isinstance(part, dict) else _NOT_THERE
        if part is not _NOT_THERE:
            found[name] = part
    return found if fields else whole
