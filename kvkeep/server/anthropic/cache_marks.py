"""`cache_control` marks: which prefixes of a prompt a request pins, and how usage counts them.

A mark says that the prompt up to the end of its block will come again. Every prompt reuses all that
it can without marks; a mark only protects the session that holds the prefix from eviction.
"""

import json
from asyncio import to_thread
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

from kvkeep.chat.anthropic_history import entries_in_force
from kvkeep.chat.anthropic_messages import parse_chat
from kvkeep.chat.context_edits import without_reasoning
from kvkeep.chat.messages import Message
from kvkeep.engine import PinRequest, Usage
from kvkeep.errors import InvalidArgument
from kvkeep.server.anthropic.request import CountTokensRequest
from kvkeep.server.chat_input import ChatInput
from kvkeep.server.service import RequestContext
from kvkeep.session.token_diff import common_length

_MARK = "cache_control"
_MAX_MARKS = 4  # of one request; further ones at its beginning are ignored
_MAX_LENGTHS = 256  # remembered lengths of marked prefixes
_FIVE_MINUTES, _ONE_HOUR = 300.0, 3600.0
_Fields = Mapping[str, Any]
_QUESTION: _Fields = {"messages": [{"role": "user", "content": "-"}]}


@dataclass(frozen=True)
class CacheMark:
    """A marked end of a prefix. fields: of a request that ends there; None for the whole one."""

    seconds: float
    fields: _Fields | None


async def pinned_prefixes(
    context: RequestContext, body: CountTokensRequest, prompt: ChatInput
) -> tuple[PinRequest, ...]:
    """Return the prefixes of a prompt that its request marks, the shortest first."""
    marks = find_marks(body)
    return await to_thread(_pin_requests, context, body, prompt, marks) if marks else ()


def find_marks(body: CountTokensRequest) -> list[CacheMark]:
    """Return the marks of a request in the order of its prompt.

    Chat templates write tools into the system text or next to it: a mark of a tool is one of both.
    """
    newest_first = islice(_marks_from_end(body), _MAX_MARKS)
    return [*newest_first][::-1]


def _marks_from_end(body: CountTokensRequest) -> Iterator[CacheMark]:
    if body.cache_control:
        yield CacheMark(_seconds(body.cache_control), None)
    yield from _message_marks(body)
    preamble = {"system": body.system, "tools": body.tools, **_QUESTION}
    for tools in _marked_beginnings(body.tools):
        yield CacheMark(_seconds(tools[-1][_MARK]), preamble)
    for system in _marked_beginnings(body.system):
        yield CacheMark(_seconds(system[-1][_MARK]), {**preamble, "system": system})


def _message_marks(body: CountTokensRequest) -> Iterator[CacheMark]:
    """Yield the marks of the messages that the prompt has, of which prefixes consist, too."""
    history = [entry.message for entry in entries_in_force(body.messages)]
    for index in reversed(range(len(history))):
        message = history[index]
        content = message.get("content")
        for blocks in _marked_beginnings(content):
            messages = [*history[:index], {**message, "content": blocks}]
            is_whole = len(messages) == len(history) and len(blocks) == len(content or ())
            fields = {"system": body.system, "tools": body.tools, "messages": messages}
            yield CacheMark(_seconds(blocks[-1][_MARK]), None if is_whole else fields)


def _marked_beginnings(blocks: Any) -> Iterator[list[Any]]:
    """Yield the blocks up to each marked one, the last marked one first."""
    for end in range(len(blocks) if isinstance(blocks, list) else 0, 0, -1):
        block = blocks[end - 1]
        if isinstance(block, Mapping) and block.get(_MARK):
            yield blocks[:end]


def _seconds(mark: Any) -> float:
    """Return the time of a mark; five minutes unless it says one hour."""
    return _ONE_HOUR if isinstance(mark, Mapping) and mark.get("ttl") == "1h" else _FIVE_MINUTES


def _pin_requests(
    context: RequestContext,
    body: CountTokensRequest,
    prompt: ChatInput,
    marks: Sequence[CacheMark],
) -> tuple[PinRequest, ...]:
    seconds_by_length = dict[int, float]()
    for mark in marks:
        length = _prefix_length(context, body, prompt, mark.fields)
        if length:
            seconds_by_length[length] = max(seconds_by_length.get(length, 0.0), mark.seconds)
    return tuple(PinRequest(s, length) for length, s in sorted(seconds_by_length.items()))


def _prefix_length(
    context: RequestContext, body: CountTokensRequest, prompt: ChatInput, fields: _Fields | None
) -> int:
    """Return how many first tokens of a prompt belong to a marked prefix.

    A conversation's marks come again with each of its requests, and are rendered once.
    """
    if fields is None and body.messages[-1].get("role") == "assistant":
        return len(prompt.ids)
    if fields is not None and body.context_management:  # what it clears differs from turn to turn
        ids = _render(context, body, fields, False, prompt.chat.messages)
        return common_length(prompt.ids, ids)
    options = body.render_options()
    key_parts = [context.owner, repr(options), _without_marks(fields)]
    key_text = json.dumps(key_parts, sort_keys=True, default=repr)
    key = blake2b(key_text.encode(errors="replace")).digest()
    lengths = context.service.prefix_lengths
    length = lengths.pop(key, None)
    if length is None:
        if fields is None:  # the prompt ends where the answer begins
            length = len(_render(context, body, _QUESTION, True))
            length -= len(_render(context, body, _QUESTION, False))
        else:
            length = common_length(prompt.ids, _render(context, body, fields, False))
    lengths[key] = length
    while len(lengths) > _MAX_LENGTHS:
        lengths.popitem(last=False)
    return max(0, len(prompt.ids) - length) if fields is None else min(length, len(prompt.ids))


def _render(
    context: RequestContext,
    body: CountTokensRequest,
    fields: _Fields,
    generation_prompt: bool,
    edited: Sequence[Message] = (),
) -> list[int]:
    """Return the token ids of a request; none if the template cannot render it.

    edited: the messages of the whole request after edits of its context.
    """
    options = replace(body.render_options(), generation_prompt=generation_prompt)
    service = context.service
    try:
        chat, _ = service.ruled(context.owner, parse_chat(fields), whole=False)
        sent = chat.messages
        chat = replace(chat, messages=_as_edited(sent, edited))
        # As in the request's prompt: thinking that is cleared does not come back.
        pairs = zip(sent, chat.messages, strict=True)
        restores = not any(before.reasoning and not after.reasoning for before, after in pairs)
        written = service.engine.written
        find_written = partial(written.find, context.owner, restore_reasoning=restores)
        return service.model.renderer.render(chat, options, find_written).ids
    except InvalidArgument:  # such as a conversation that ends with a call
        return []


def _as_edited(messages: Sequence[Message], edited: Sequence[Message]) -> tuple[Message, ...]:
    """Return the first messages of a request as they are after its edits."""
    result = list(messages)
    for index, (before, after) in enumerate(zip(messages, edited, strict=False)):
        if before.reasoning and not after.reasoning:
            before = without_reasoning(before)
        count = len(before.parts)
        is_last = index == len(messages) - 1
        if before.role != after.role or not (is_last or len(after.parts) == count):
            break
        result[index] = replace(after, parts=after.parts[:count])
    return tuple(result)


def _without_marks(value: Any) -> Any:
    """Return a JSON value without marks, which clients move from turn to turn."""
    if isinstance(value, Mapping):
        return {key: _without_marks(item) for key, item in value.items() if key != _MARK}
    return [_without_marks(item) for item in value] if isinstance(value, list) else value


def usage_fields(
    usage: Usage, pins: Sequence[PinRequest], thinking_tokens: int = 0
) -> dict[str, Any]:
    """Return the usage of a message. pins: of the prompt; what they add to the cache counts apart.

    The counts of tokens that are read, created, and neither, add up to the prompt. Where prefixes
    of an hour and of five minutes overlap, the tokens count for the hour.
    """
    read = usage.reuse.tokens
    ends = {pin.seconds: max(0, (pin.tokens or 0) - read) for pin in pins}  # the longest is last
    created = max(ends.values(), default=0)
    created_for_hour = ends.get(_ONE_HOUR, 0)
    return {
        "input_tokens": usage.evaluated - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - created_for_hour,
            "ephemeral_1h_input_tokens": created_for_hour,
        },
        "output_tokens": usage.generated,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
        "service_tier": "standard",
    }
