"""`/v1/responses/compact`: a conversation compacted on its cells, behind an opaque item.

The compacted session is a named one of the owner, so that it is saved and survives restarts. A
request whose input has the item continues in a fork of it. If it is gone, the history in the item
is evaluated instead. Where several servers share a store, a labelled snapshot of the same name is
there for the others.
"""

import secrets
import time
from asyncio import to_thread, wrap_future
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvkeep.chat.compaction_items import (
    CompactedHistory,
    compaction_item,
    expand_compaction,
    is_handle,
    kept_items,
    new_handle,
    user_messages,
)
from kvkeep.chat.openai_responses import input_items, new_item_id, parse_chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.engine import GenerationRequest
from kvkeep.engine.session_files import LabelledSnapshots
from kvkeep.errors import ContextFull, InvalidArgument, KvkeepError
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import chat_input
from kvkeep.server.errors import ApiError
from kvkeep.server.limits import LongText, Messages, ShortText, parse_json, require_few_values
from kvkeep.server.openai import stored_items
from kvkeep.server.openai.response_configuration import configured
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.schemas import RequestBody
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.session.session import Session
from kvkeep.session.token_diff import common_length

router = body_router()
_TARGET = 0.5  # of max_kv_size
_MAX_SESSIONS = 16  # compacted ones of an owner; of older ones the items' histories are left
_PROMPT_FIELDS = {"instructions", "tools", "tool_choice"}


class _HistoryFields(RequestBody):
    """The JSON in a compaction item. It comes from a client, and has the limits of a body."""

    handle: ShortText
    items: Messages


class ResponseCompactionRequest(ResponsesRequest):
    input: LongText | Messages = []  # noqa: RUF012 (pydantic copies it)


@router.post("/v1/responses/compact")
@router.post("/responses/compact", include_in_schema=False)
async def compact(body: ResponseCompactionRequest, context: ContextDep) -> dict[str, Any]:
    """Compact a conversation into its user messages and one opaque compaction item."""
    items = await stored_items.conversation(body.input, body.previous_response_id, context)
    items, _ = await expand_items(items, context)
    body = configured(body, items)
    compacted = await compact_conversation(body, items, context)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*map(_output_message, user_messages(items)), compacted.item],
        "usage": compacted.usage,
    }


def _output_message(item: dict[str, Any]) -> dict[str, Any]:
    """Return a user's message as clients read it from an output: with type, id and status."""
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    fields = {"id": new_item_id("message"), "status": "completed", **item}
    return {**fields, "type": "message", "content": content}


async def expand_items(
    items: Sequence[Any], context: RequestContext
) -> tuple[list[Any], str | None]:
    """Return a request's items with the history in place of a compaction item, and its handle.

    In a thread, since an item may stand for many megabytes.
    """
    expanded, handle, warnings = await to_thread(expand_compaction, items, _parse_history)
    context.notices.warn(*warnings)
    return expanded, handle


def _parse_history(document: bytes) -> CompactedHistory:
    """Parse the JSON in a compaction item. Raises ValueError if it is beyond a limit."""
    try:
        require_few_values(document)
    except ApiError as error:
        raise ValueError(error.message) from error
    fields = _HistoryFields.model_validate(parse_json(document))
    return CompactedHistory(fields.handle, tuple(fields.items))


@dataclass(frozen=True)
class CompactedConversation:
    """A conversation's compaction item, and the lengths of its prompts before and after."""

    item: dict[str, Any]
    tokens_before: int
    tokens_after: int

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the compaction: the prompt before it and the one after it."""
        return {
            "input_tokens": self.tokens_before,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.tokens_after,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.tokens_before + self.tokens_after,
        }


async def compact_conversation(
    body: ResponsesRequest, items: Sequence[Any], context: RequestContext
) -> CompactedConversation:
    """Compact a conversation on its cells, or as text alone where that is impossible.

    items: without compaction items. body: the request with its instructions and tools.
    """
    kept, handle = await to_thread(kept_items, items), new_handle()
    whole_ids = await _encode(body, items, context)
    kept_ids = await _encode(body, kept, context)
    system_end = common_length(kept_ids, await _encode(body, input_items("-"), context))
    try:
        await _compact_cells(whole_ids, kept_ids, system_end, handle, context)
        if context.engine.shares_snapshots:
            await wrap_future(context.engine.snapshot(handle, handle, context.owner))
    except KvkeepError as error:  # the history in the item is evaluated then
        context.notices.warn(f"compacted as text only: {error}")
        with suppress(KvkeepError):
            await wrap_future(context.engine.delete(handle, context.owner))
    await _drop_oldest(context)
    item = await to_thread(compaction_item, CompactedHistory(handle, tuple(kept)))
    return CompactedConversation(item, len(whole_ids), len(kept_ids))


async def _drop_oldest(context: RequestContext) -> None:
    """Delete the owner's oldest compacted sessions: clients compact a conversation repeatedly."""
    records = await wrap_future(context.engine.sessions(context.owner))
    compacted = [record for record in records if is_handle(record.name)]
    compacted.sort(key=lambda record: record.created)
    for record in compacted[:-_MAX_SESSIONS]:
        with suppress(KvkeepError):  # a busy one is deleted after a later compaction
            await wrap_future(context.engine.delete(record.name, context.owner))
    if context.engine.shares_snapshots:
        await to_thread(_drop_oldest_snapshots, context.engine.snapshots(context.owner))


def _drop_oldest_snapshots(snapshots: LabelledSnapshots) -> None:
    dated = list[tuple[float, str]]()
    for name in filter(is_handle, snapshots.names()):
        with suppress(FileNotFoundError):  # another server has deleted it
            dated.append((snapshots.path(name).stat().st_mtime, name))
    for _, name in sorted(dated)[:-_MAX_SESSIONS]:
        with suppress(KvkeepError, FileNotFoundError):
            snapshots.remove(name)


async def prepare_compacted(
    ids: Sequence[int], name: str, handle: str, context: RequestContext
) -> int:
    """Create a session that continues a compacted one.

    Returns how many of the prompt's first tokens it holds; 0 if there is no session to continue.
    """
    if not is_handle(handle):  # of an item that was not made here
        return 0
    return await wrap_future(context.engine.continue_compacted(ids, name, handle, context.owner))


async def _encode(
    body: ResponsesRequest, items: Sequence[Any], context: RequestContext
) -> list[int]:
    """Return the tokens of a conversation, up to the end of its last message."""
    parse = partial(parse_chat, {**body.model_dump(include=_PROMPT_FIELDS), "input": list(items)})
    options = RenderOptions(
        continue_final=False,
        generation_prompt=False,
        template_kwargs=body.render_options().variables(),
    )
    return (await chat_input(context, parse, options)).ids


async def _compact_cells(
    whole_ids: list[int],
    kept_ids: list[int],
    system_end: int,
    handle: str,
    context: RequestContext,
) -> None:
    """Create the compacted session: the cells of the whole conversation, edited and compressed.

    system_end: how many first tokens are the system prompt, which stays exact.
    """
    engine, owner, model = context.engine, context.owner, context.service.model
    progress = engine.yield_turn
    held = await wrap_future(engine.prepare(whole_ids, handle, owner))
    stream = await context.generate(GenerationRequest(tuple(whole_ids[held:]), 0), handle)
    await context.collect(stream)

    def edit(session: Session) -> None:
        try:
            session.align(kept_ids, mode="in_place", progress=progress)
        except (InvalidArgument, ContextFull):  # such as of a model with states
            session.align(kept_ids, mode="exact", progress=progress)
        if system_end:
            session.name("system", 0, system_end)
        if session.policy == "full":
            calibration = model.calibration
            session.compact(
                _TARGET, steps=("compress",), calibration=calibration, progress=progress
            )

    await wrap_future(engine.change_in_steps(handle, owner, "compact", edit))
