"""The conversation that a response answers: its items, its tools, and its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvkeep.chat.control_items import (
    CONFIGURATION,
    TRIGGER,
    added_tools,
    item_type,
    unknown_types,
)
from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_responses import parse_chat
from kvkeep.chat.openai_tools import client_types, hosted_tools
from kvkeep.server.chat_input import ChatInput, chat_input
from kvkeep.server.ignored_fields import RESPONSES_RULES
from kvkeep.server.openai import stored_items
from kvkeep.server.openai.compaction import expand_items
from kvkeep.server.openai.response_configuration import unknown_settings
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.service import RequestContext

_PROMPT_FIELDS = {"instructions", "tools", "tool_choice"}


@dataclass(frozen=True)
class ResponseConversation:
    """The items that a response answers, stored ones included.

    expanded: the same with the history in place of a compaction item. handle: of the session of
    that item; None if there is none. ends_with_trigger: whether the request is to compact it.
    """

    items: list[dict[str, Any]]
    expanded: list[Any]
    handle: str | None = None
    ends_with_trigger: bool = False

    @property
    def added_tools(self) -> list[Any]:
        """The entries of tools in items."""
        return added_tools(self.expanded)

    def client_types(self, body: ResponsesRequest) -> list[str]:
        """Return the types of a request's tools that the client runs, and that are no functions."""
        return client_types([*(body.tools or ()), *self.added_tools])


async def read_conversation(
    body: ResponsesRequest, context: RequestContext
) -> ResponseConversation:
    """Return the conversation of a request. Raises as `stored_items.conversation`."""
    items = await stored_items.conversation(body.input, body.previous_response_id, context)
    ends_with_trigger = bool(items) and item_type(items[-1]) == TRIGGER
    conversation = await expand([item for item in items if item_type(item) != TRIGGER], context)
    expanded, handle = conversation.expanded, conversation.handle
    return ResponseConversation(conversation.items, expanded, handle, ends_with_trigger)


async def expand(items: list[dict[str, Any]], context: RequestContext) -> ResponseConversation:
    """Return the conversation of these items."""
    return ResponseConversation(items, *await expand_items(items, context))


async def prompt_of(
    conversation: ResponseConversation, body: ResponsesRequest, context: RequestContext
) -> ChatInput:
    """Return the prompt of a conversation."""
    parse = partial(parse_items, body, conversation.expanded)
    return await chat_input(context, parse, body.render_options())


def parse_items(body: ResponsesRequest, items: Sequence[Any]) -> Chat:
    """Return the conversation of a request's instructions and tools, and these items."""
    return parse_chat({**body.model_dump(include=_PROMPT_FIELDS), "input": list(items)})


def name_ignored(body: ResponsesRequest, context: RequestContext) -> None:
    """Name what a request asks for in vain. Raises ApiError for a field that is refused."""
    RESPONSES_RULES.check(body, context.notices)
    ignore, items = context.notices.ignore, body.input if isinstance(body.input, list) else []
    ignore(*(f"tools.{kind}" for kind in hosted_tools([*(body.tools or ()), *added_tools(items)])))
    kinds = [entry.type for entry in body.context_management or () if entry.type != "compaction"]
    ignore(*(f"context_management.{kind}" for kind in kinds))
    ignore(*unknown_types(items), *unknown_types(body.instructions, "instructions"))
    for item in items:
        if item_type(item) == CONFIGURATION:
            ignore(*unknown_settings(item))
    if TRIGGER in map(item_type, items[:-1]):  # it must be the last item
        ignore(f"input.{TRIGGER}")
