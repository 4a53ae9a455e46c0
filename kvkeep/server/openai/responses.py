"""`/v1/responses`: answers that are kept, and from which others go on.

A response is a session of the engine. One that goes on from it is a fork: the parent never changes,
so that any number of others may go on from it. What the parent holds of the new prompt stays, which
is all of it where the template writes a conversation as it was; a template that strips what was
said before makes the rest be evaluated again, and `cached_tokens` says so.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress
from kvkeep.errors import InvalidArgument, KvkeepError, NoSuchSession
from kvkeep.server.errors import Problem, problem_of
from kvkeep.server.health import now
from kvkeep.server.openai.chat import forced_by, longest, prompt_ids
from kvkeep.server.openai.response_items import (
    Reply,
    ending,
    function_tools,
    message_item,
    messages_of,
    text_part,
)
from kvkeep.server.openai.usage import progress_of, timings_of
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_TOKENS, Body, Choosing, Owner, Serving
from kvkeep.server.service import Running, Service
from kvkeep.server.sse import event, stream
from kvkeep.server.tools import Tools, checked_tools

router = APIRouter()
_Id = Annotated[str, Path(pattern=r"^resp_[0-9a-f]{24}$")]
_RESPONSE, _MESSAGES = "response", "messages"  # of a session's notes


class TextForm(Body):
    format: dict[str, Any] | None = None


class Create(Choosing):
    """A request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(pattern=r"^resp_[0-9a-f]{24}$")] = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MOST_TOKENS)] = None
    store: bool | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextForm | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    return_progress: bool = False
    timings_per_token: bool = False

    def wanted_schema(self) -> dict[str, Any] | None:
        form = (self.text.format if self.text else None) or {"type": "text"}
        if form.get("type") == "json_schema":
            schema = form.get("schema")
            if not isinstance(schema, dict):
                raise InvalidArgument("text.format.schema must be a JSON schema")
            return schema
        if form.get("type") not in ("text", "json_object"):
            raise InvalidArgument(f"text.format.type cannot be {form.get('type')!r}")
        return {"type": "object"} if form["type"] == "json_object" else None


@dataclass
class _Making:
    """A response on its way.

    held: tokens of its prompt that were there. body: as it is now. progress, timed: whether steps
    of the prompt, and the time of each token, are told.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    prompt: int
    held: int
    running: Running
    tools: Tools | None
    progress: bool = False
    timed: bool = False
    item: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def timings(self) -> dict[str, Any]:
        """Until now, where that is wanted."""
        return {"timings": timings_of(self.running.answers[0].usage)} if self.timed else {}


@router.post("/v1/responses", response_model=None, responses=STREAMED)
@router.post("/responses", response_model=None, include_in_schema=False)
async def create(
    body: Create, request: HttpRequest, service: Serving, owner: Owner
) -> Response | dict[str, Any]:
    """Answers, where nothing or where an earlier response stands."""
    making = await _begun(body, service, owner)
    if body.stream:
        return stream(_streamed(making, service, owner))
    try:
        async with making.running.until_gone(request):
            text, end = "", None
            async for _, each in making.running:
                if isinstance(each, (GeneratedToken, Finished)):
                    text += each.text
                end = each
    except BaseException:
        await _forget(making.body["id"], service, owner)
        raise
    assert isinstance(end, Finished)
    return await _done(making, text, end, service, owner)


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: Create, service: Serving, owner: Owner) -> dict[str, Any]:
    """How many tokens the prompt would be; nothing is evaluated."""
    tools = checked_tools(function_tools(body.tools or ()), body.tool_choice)
    system, messages = await _all_messages(body, service, owner)
    ids = await prompt_ids(service, [*system, *messages], tools)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@router.get("/v1/responses/{response}")
async def retrieve(response: _Id, service: Serving, owner: Owner) -> dict[str, Any]:
    """A response that was stored."""
    return await _stored(response, service, owner)


@router.delete("/v1/responses/{response}")
async def delete(response: _Id, service: Serving, owner: Owner) -> dict[str, Any]:
    """Forgets it; those that went on from it stay."""
    await _stored(response, service, owner)
    await asyncio.wrap_future(service.engine.delete(response, owner))
    return {"id": response, "object": "response", "deleted": True}


@router.post("/v1/responses/{response}/cancel")
async def cancel(response: _Id, service: Serving, owner: Owner) -> dict[str, Any]:
    """Ends one that is still being made, after the current token."""
    making = service.making.get((owner, response))
    if making is not None:
        making.running.cancel()
        return {**making.body, "status": "cancelled"}
    return await _stored(response, service, owner)


async def _begun(body: Create, service: Service, owner: str) -> _Making:
    tools = checked_tools(function_tools(body.tools or ()), body.tool_choice)
    schema, name = body.wanted_schema(), f"resp_{secrets.token_hex(12)}"
    system, messages = await _all_messages(body, service, owner)
    ids = await prompt_ids(service, [*system, *messages], tools)
    samplings = forced_by(service, body.samplings(), tools, schema)
    most = longest(service, body.max_output_tokens)
    _require_fits(body, len(ids), service)
    engine = service.engine
    if body.previous_response_id is not None:
        fork = engine.fork(body.previous_response_id, owner, new=name, notes={})
        await asyncio.wrap_future(fork)
    try:
        held = await asyncio.wrap_future(engine.prepare(ids, name, owner))
        ask = GenerationRequest(tuple(ids[held:]), most, samplings[0])
        running = await service.answers(ask, owner, session=name)
    except BaseException:
        await _forget(name, service, owner)
        raise
    told = _response(name, body, service)
    made = _Making(told, messages, len(ids), held, running, tools)
    made.progress, made.timed = body.return_progress, body.timings_per_token
    service.making[owner, name] = made
    return made


def _response(name: str, body: Create, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.name,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": body.truncation or "auto",
        "usage": None,
    }


def _require_fits(body: Create, prompt: int, service: Service) -> None:
    """Where nothing may be forgotten. Raises Problem."""
    most = service.engine.settings.get("max_kv_size") or service.model.spec.max_positions
    if body.truncation == "disabled" and prompt + (body.max_output_tokens or 1) > most:
        raise Problem(
            400,
            f"the prompt has {prompt} tokens, and {most} are held: nothing may be forgotten with "
            'truncation "disabled"',
            "exceed_context_size_error",
            more={"n_prompt_tokens": prompt, "n_ctx": most},
        )


async def _done(
    making: _Making, text: str, end: Finished, service: Service, owner: str
) -> dict[str, Any]:
    """The whole response, which is stored if that is wanted."""
    reply = Reply(text, making.tools, making.item)
    made = {**making.body, "output": reply.items(), **ending(end, making.prompt, making.held)}
    name = making.body["id"]
    service.making.pop((owner, name), None)
    if not made["store"]:
        await _forget(name, service, owner)
        return made
    notes = {_RESPONSE: made, _MESSAGES: [*making.messages, reply.message()]}
    await asyncio.wrap_future(service.engine.set_notes(name, owner, notes))
    return made


async def _streamed(making: _Making, service: Service, owner: str) -> AsyncIterator[bytes]:
    numbers, text = iter(range(10**9)), ""
    item, part = making.item, {"item_id": making.item, "output_index": 0, "content_index": 0}

    def told(kind: str, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    finished = False
    try:
        yield told("response.created", response=making.body)
        yield told("response.in_progress", response=making.body)
        if making.tools is None:
            started = message_item(item, "", "in_progress")
            yield told("response.output_item.added", output_index=0, item=started)
            yield told("response.content_part.added", **part, part=text_part(""))
        async for _, each in making.running:
            if isinstance(each, PrefillProgress) and making.progress:
                seen = {"prompt_progress": progress_of(each)}
                yield told("response.in_progress", response=making.body, **seen)
            if not isinstance(each, (GeneratedToken, Finished)):
                continue
            text += each.text
            if each.text and making.tools is None:
                delta = {"delta": each.text, "logprobs": [], **making.timings()}
                yield told("response.output_text.delta", **part, **delta)
            if isinstance(each, Finished):
                made = await _done(making, text, each, service, owner)
                finished = True
                if making.tools is None:
                    yield told("response.output_text.done", **part, text=text, logprobs=[])
                    yield told("response.content_part.done", **part, part=text_part(text))
                for index, one in enumerate(made["output"]):
                    if making.tools is not None:
                        yield told("response.output_item.added", output_index=index, item=one)
                    yield told("response.output_item.done", output_index=index, item=one)
                spent = {"timings": timings_of(each.usage)}
                yield told(f"response.{made['status']}", response=made, **spent)
    except Exception as error:  # the status is sent: what happened is the last event
        problem = problem_of(error)
        yield told("error", code=problem.kind, message=problem.message, param=problem.param)
    finally:
        if not finished:
            await asyncio.shield(_forget(making.body["id"], service, owner))


async def _stored(name: str, service: Service, owner: str) -> dict[str, Any]:
    try:
        kept = await asyncio.wrap_future(service.engine.find(name, owner))
    except NoSuchSession:
        raise Problem(404, f"there is no response {name!r}", "not_found_error") from None
    found: dict[str, Any] | None = kept.notes.get(_RESPONSE)
    if found is None:
        raise Problem(404, f"response {name!r} is not there yet", "not_found_error")
    return found


async def _all_messages(
    body: Create, service: Service, owner: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The instructions, and all that was said."""
    before = await _messages_before(body.previous_response_id, service, owner)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return system, [*before, *messages_of(body.input)]


async def _messages_before(name: str | None, service: Service, owner: str) -> list[dict[str, Any]]:
    if name is None:
        return []
    await _stored(name, service, owner)
    kept = await asyncio.wrap_future(service.engine.find(name, owner))
    return list(kept.notes[_MESSAGES])


async def _forget(name: str, service: Service, owner: str) -> None:
    """A response that is not kept; what is at work in it ends first."""
    making = service.making.pop((owner, name), None)
    if making is not None:
        making.running.cancel()
    with contextlib.suppress(KvkeepError):
        await asyncio.wrap_future(service.engine.discard(name, owner))
