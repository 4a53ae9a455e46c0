"""`prompt_cache_breakpoint` on parts of content: the prefixes of a prompt that a request pins.

The counterpart of `cache_control` in Anthropic's API. Every prompt reuses all that it can without
breakpoints; one only protects the session that holds the prefix from eviction.
"""

import json
from asyncio import to_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

from kvkeep.chat.messages import Chat
from kvkeep.engine import PinRequest
from kvkeep.errors import InvalidArgument
from kvkeep.server.chat_input import ChatInput
from kvkeep.server.openai.cache_fields import PinningRequest
from kvkeep.server.service import RequestContext
from kvkeep.session.token_diff import common_length

_MARK = "prompt_cache_breakpoint"
_MAX_MARKS = 4  # of one request; further ones at its beginning are ignored
_MAX_LENGTHS = 256  # remembered lengths of marked prefixes


@dataclass(frozen=True)
class Breakpoint:
    """A marked end of a prefix. messages: of a conversation that ends there."""

    lifetime: Any  # as the client states it
    messages: list[Any]


async def requested_pins(
    context: RequestContext,
    body: PinningRequest,
    prompt: ChatInput,
    messages: Sequence[Any],
    parse: Callable[[Sequence[Any]], Chat],
) -> tuple[PinRequest, ...]:
    """Return the prefixes of a prompt that its request pins.

    messages: of the request, or its items. parse: returns the conversation of some of them.
    """
    implicit = body.pins(len(prompt.ids))
    marks = list(islice(find_breakpoints(messages), _MAX_MARKS - len(implicit)))
    if not marks:
        return implicit
    explicit = await to_thread(_pin_requests, context, body, prompt, marks, parse)
    return (*explicit, *implicit)


def find_breakpoints(messages: Sequence[Any]) -> Iterator[Breakpoint]:
    """Yield the breakpoints of messages or items, the last one first."""
    for index in reversed(range(len(messages))):
        message = messages[index]
        for field in ("content", "output"):
            value = message.get(field) if isinstance(message, Mapping) else None
            parts = value if isinstance(value, list) else []
            for end in range(len(parts), 0, -1):
                mark = parts[end - 1].get(_MARK) if isinstance(parts[end - 1], Mapping) else None
                if isinstance(mark, Mapping):
                    cut = {**message, field: parts[:end]}
                    yield Breakpoint(mark.get("ttl"), [*messages[:index], cut])


def _pin_requests(
    context: RequestContext,
    body: PinningRequest,
    prompt: ChatInput,
    marks: Sequence[Breakpoint],
    parse: Callable[[Sequence[Any]], Chat],
) -> tuple[PinRequest, ...]:
    seconds_by_length = dict[int, float]()
    for mark in marks:
        length = _prefix_length(context, body, prompt, partial(parse, mark.messages))
        if length:
            seconds = body.breakpoint_seconds(mark.lifetime)
            seconds_by_length[length] = max(seconds_by_length.get(length, 0.0), seconds)
    return tuple(PinRequest(s, length) for length, s in sorted(seconds_by_length.items()))


def _prefix_length(
    context: RequestContext, body: PinningRequest, prompt: ChatInput, parse: Callable[[], Chat]
) -> int:
    """Return how many first tokens of a prompt belong to a marked prefix; 0 if it has none.

    A conversation's marks come again with each of its requests, and are rendered once.
    """
    options = replace(body.render_options(), continue_final=False, generation_prompt=False)
    try:
        chat, _ = context.service.ruled(context.owner, parse(), whole=False)
    except InvalidArgument:  # such as of a system text alone
        return 0
    key_text = json.dumps([context.owner, repr(options), repr(chat)])
    key = blake2b(key_text.encode(errors="replace")).digest()
    lengths = context.service.prefix_lengths
    length = lengths.pop(key, None)
    if length is None:
        find_written = partial(context.engine.written.find, context.owner)
        try:
            ids = prompt.renderer.render(chat, options, find_written).ids
        except InvalidArgument:  # such as a conversation that ends with a call
            ids = []
        length = common_length(prompt.ids, ids)
    lengths[key] = length
    while len(lengths) > _MAX_LENGTHS:
        lengths.popitem(last=False)
    return min(length, len(prompt.ids))
