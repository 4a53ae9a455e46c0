"""`/completion`, and sessions as slots: what clients of llama.cpp's server know."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Ask, Finished, Likely, Read, Written
from kvkeep.errors import InvalidArgument, NoSuchSession
from kvkeep.server.asked import MOST_TOKENS, Choosing, Owner, Serving
from kvkeep.server.llamacpp.text import SLOTS, piece_of, slot_name
from kvkeep.server.openai.chat import asked
from kvkeep.server.openai.usage import timings_of
from kvkeep.server.problems import problem_of
from kvkeep.server.service import Running, Service
from kvkeep.server.sse import event, stream

router = APIRouter()
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_STOPS = {"eos": "eos", "stop": "word", "length": "limit", "full": "limit"}
_DEFAULT_TEMPERATURE = 0.8


class Completion(Choosing):
    """A request. prompt: a text, token ids, or both in one list; n_predict: -1 for no end."""

    prompt: str | Annotated[list[_Id | str], Field(max_length=1_000_000)]
    n_predict: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] = -1
    stream: bool = False
    n_probs: Annotated[int, Field(ge=0, le=100)] = 0
    ignore_eos: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    id_slot: Annotated[int, Field(ge=-1, lt=SLOTS)] = -1

    def ids(self, service: Service) -> list[int]:
        text = service.model.text
        if isinstance(self.prompt, str):
            return [*text.opening_ids, *text.encode(self.prompt, special=True)]
        ids: list[int] = []
        for part in self.prompt:
            ids += text.encode(part, special=True) if isinstance(part, str) else [part]
        return ids


class Filename(Choosing):
    filename: Annotated[str, Field(max_length=200)] = ""


@router.post("/completion", response_model=None)
@router.post("/completions", response_model=None, include_in_schema=False)
async def completion(
    body: Completion, request: Request, service: Serving, owner: Owner
) -> Response | dict[str, Any]:
    """Goes on from a prompt."""
    ids = await asyncio.to_thread(body.ids, service)
    if not ids:
        raise InvalidArgument("the prompt is empty")
    running = await _running(body, ids, service, owner)
    reply = _Reply(body, ids, service)
    if body.stream:
        return stream(reply.streamed(running))
    async with running.until_gone(request):
        return await reply.whole(running)


@router.post("/slots/{slot}")
async def slots(
    slot: Annotated[int, Path(ge=0, lt=SLOTS)],
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    service: Serving,
    owner: Owner,
    body: Filename | None = None,
) -> dict[str, Any]:
    """Saves a slot's session under a name, puts one in its place, or empties it."""
    engine, name, begun = service.engine, slot_name(slot), time.perf_counter()
    label = body.filename if body else ""
    if action == "save":
        size = await asyncio.wrap_future(engine.snapshot(name, label, owner))
        tokens = await _tokens(service, name, owner)
        spent = 1000 * (time.perf_counter() - begun)
        done = {"filename": label, "n_saved": tokens, "n_written": size}
        return {"id_slot": slot, **done, "timings": {"save_ms": spent}}
    if action == "erase":
        return {"id_slot": slot, "n_erased": await _erased(service, name, owner)}
    await asyncio.wrap_future(engine.restore(label, owner, name, instead=True))
    spent = 1000 * (time.perf_counter() - begun)
    size = engine.snapshots(owner).path(label).stat().st_size
    done = {"n_restored": await _tokens(service, name, owner), "n_read": size}
    return {"id_slot": slot, "filename": label, **done, "timings": {"restore_ms": spent}}


async def _erased(service: Service, name: str, owner: str) -> int:
    try:
        tokens = await _tokens(service, name, owner)
    except NoSuchSession:
        return 0
    await asyncio.wrap_future(service.engine.delete(name, owner))
    return tokens


async def _tokens(service: Service, name: str, owner: str) -> int:
    return await asyncio.wrap_future(
        service.engine.look(name, owner, lambda kept: len(kept.live.tokens))
    )


async def _running(body: Completion, ids: list[int], service: Service, owner: str) -> Running:
    (sampling,) = body.samplings(temperature=_DEFAULT_TEMPERATURE)
    most = service.model.spec.max_positions if body.n_predict < 0 else body.n_predict
    likely = body.n_probs or None
    ask = Ask(tuple(ids), most, sampling, body.ignore_eos, likely)
    if body.id_slot < 0:
        return await asked(service, ask, owner, [sampling])
    name = slot_name(body.id_slot)
    held = await asyncio.wrap_future(service.engine.prepare(ids, name, owner))
    rest = Ask(tuple(ids[held:]), most, sampling, body.ignore_eos, likely)
    return await service.answers(rest, owner, session=name)


class _Reply:
    """An answer, made into what a client of llama.cpp reads."""

    def __init__(self, body: Completion, ids: list[int], service: Service):
        self._body, self._ids, self._service = body, ids, service

    async def whole(self, running: Running) -> dict[str, Any]:
        text, written, end = "", list[Written](), None
        async for _, each in running:
            if isinstance(each, Written):
                written.append(each)
            if isinstance(each, (Written, Finished)):
                text += each.text
            end = each
        assert isinstance(end, Finished)
        return {**self._end(end), **self._said(text, written)}

    async def streamed(self, running: Running) -> AsyncIterator[bytes]:
        try:
            async for _, each in running:
                if isinstance(each, Read) and self._body.return_progress:
                    progress = {
                        "total": each.total,
                        "cache": each.reuse.tokens,
                        "processed": each.done,
                        "time_ms": round(1000 * each.seconds),
                    }
                    yield event({"prompt_progress": progress, "content": "", "stop": False})
                elif isinstance(each, Written):
                    yield event({"index": 0, **self._said(each.text, [each]), "stop": False})
                elif isinstance(each, Finished):
                    yield event({**self._end(each), **self._said(each.text, [])})
        except Exception as error:  # the status is sent: what happened is the last event
            yield event(problem_of(error).body())

    def _said(self, text: str, written: list[Written]) -> dict[str, Any]:
        tokens = [each.token for each in written]
        given = self._body.return_tokens or self._body.stream
        said: dict[str, Any] = {"content": text, "tokens": tokens if given else []}
        if self._body.n_probs:
            said["completion_probabilities"] = [self._likely(each) for each in written]
        return said

    def _likely(self, each: Written) -> dict[str, Any]:
        assert each.likely is not None
        top = [self._entry(one) for one in each.top]
        return {**self._entry(each.likely), "top_logprobs": top}

    def _entry(self, likely: Likely) -> dict[str, Any]:
        piece = piece_of(self._service, likely.token)
        text = piece if isinstance(piece, str) else ""
        raw = list(piece.encode()) if isinstance(piece, str) else piece
        return {"id": likely.token, "token": text, "bytes": raw, "logprob": likely.log_probability}

    def _end(self, end: Finished) -> dict[str, Any]:
        usage, body = end.usage, self._body
        settings = body.model_dump(exclude={"prompt", *(body.model_extra or {})})
        cached = usage.reuse.tokens + len(self._ids) - usage.prompt
        return {
            "index": 0,
            "id_slot": body.id_slot,
            "stop": True,
            "model": self._service.name,
            "tokens_predicted": usage.written,
            "tokens_evaluated": len(self._ids),
            "tokens_cached": cached,
            "generation_settings": settings,
            "prompt": self._service.model.text.decode(self._ids),
            "truncated": end.reason == "full",
            "stop_type": _STOPS[end.reason],
            "stopping_word": end.stop or "",
            "timings": {**timings_of(usage), "cache_n": cached},
        }
