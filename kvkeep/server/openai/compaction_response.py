"""Responses to a `compaction_trigger`: one item, which stands for the conversation before it."""

import asyncio
import time
from asyncio import wrap_future
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.server.openai import stored_items
from kvkeep.server.openai.compaction import compact_conversation
from kvkeep.server.openai.response_prompt import ResponseConversation
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.openai.response_stream import EventEncoder
from kvkeep.server.service import RequestContext


async def compaction_response(
    response: dict[str, Any],
    body: ResponsesRequest,
    conversation: ResponseConversation,
    context: RequestContext,
) -> dict[str, Any]:
    """Compact a conversation, and return the response; store it unless `store` is false.

    response: the response object so far.
    """
    if not conversation.expanded:
        raise InvalidArgument("input has nothing before the compaction_trigger")
    compacted = await compact_conversation(body, conversation.expanded, context)
    status = {"status": "completed", "completed_at": int(time.time())}
    response = {**response, **status, "output": [compacted.item], "usage": compacted.usage}
    if body.stores:  # in a session without text: the item's own session has the cells
        await _store(response, conversation, context)
    return response


async def _store(
    response: dict[str, Any], conversation: ResponseConversation, context: RequestContext
) -> None:
    engine, name, owner = context.engine, response["id"], context.owner
    try:
        await wrap_future(engine.prepare((), name, owner))
        await stored_items.store_response(response, conversation.items, context)
    except BaseException:
        with suppress(KvkeepError):
            await asyncio.shield(wrap_future(engine.delete(name, owner)))
        raise


async def compaction_events(response: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the events of a stream of such a response."""
    encode = EventEncoder().encode
    begun = {**response, "status": "in_progress", "completed_at": None, "output": [], "usage": None}
    yield encode("response.created", response=begun)
    yield encode("response.in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        yield encode("response.output_item.added", output_index=index, item=item)
        yield encode("response.output_item.done", output_index=index, item=item)
    yield encode("response.completed", response=response)
