"""Anthropic's `context_management`: old tool results and thinking left out of a conversation.

The history is rendered without what is cleared, which is exact: the model reads a shorter prompt.
Clients keep their whole history and send it again, so the edits are a function of the request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.chat.fields import expect_mapping, optional_list, optional_mapping
from kvkeep.chat.messages import (
    Chat,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolResult,
    call_places,
    normalized,
)
from kvkeep.errors import InvalidArgument

CLEARED = "[result removed]"  # takes the place of a tool result
_TOOL_USES, _THINKING, _COMPACT = "clear_tool_uses", "clear_thinking", "compact"
_CLEARED_THINKING = "cleared_thinking_turns"  # how many, in an edit's description
_MAX_EDITS = 16  # of a request; for each the conversation may be rendered once more
_DEFAULT_TRIGGERS = {_TOOL_USES: 100_000, _COMPACT: 150_000}  # input tokens, as of the hosted API


@dataclass(frozen=True)
class ContextEdit:
    """One edit of a request.

    type: as the request names it, such as "clear_tool_uses_20250919"; kind: that without the date.
    trigger_tokens, trigger_uses: from how many input tokens or tool uses on it applies; None if not
    that. keep: how many tool uses, or turns with thinking, stay; None for all. clear_at_least: in
    input tokens. cleared_inputs: the tools whose calls lose their arguments; None for all tools.
    """

    type: str
    kind: str
    trigger_tokens: int | None = None
    trigger_uses: int | None = None
    keep: int | None = 3
    clear_at_least: int = 0
    exclude_tools: frozenset[str] = frozenset()
    cleared_inputs: frozenset[str] | None = frozenset()


def parse_edits(value: Any) -> tuple[list[ContextEdit], list[str]]:
    """Return the edits of a request's `context_management`, and the types of unknown ones.

    Raises InvalidArgument.
    """
    if value is None:
        return [], []
    where = "context_management.edits"
    edits, unknown = list[ContextEdit](), list[str]()
    entries = optional_list(expect_mapping(value, "context_management").get("edits"), where)
    if len(entries) > _MAX_EDITS:
        raise InvalidArgument(f"{where} must have at most {_MAX_EDITS} edits; found {len(entries)}")
    for index, entry in enumerate(entries):
        fields = expect_mapping(entry, f"{where}[{index}]")
        edit_type = fields.get("type")
        if not isinstance(edit_type, str):
            raise InvalidArgument(f"{where}[{index}].type must be text; found {edit_type!r:.100}")
        kind = edit_type.rpartition("_")[0]
        if kind in (_TOOL_USES, _THINKING, _COMPACT):
            edits.append(_parse_edit(fields, edit_type, kind, f"{where}[{index}]"))
        else:
            unknown.append(edit_type)
    return edits, unknown


def apply_edits(
    chat: Chat, edits: Sequence[ContextEdit], count_tokens: Callable[[Chat], int]
) -> tuple[Chat, list[dict[str, Any]]]:
    """Return the conversation after the edits, and a description of each that changed it."""
    applied: list[dict[str, Any]] = []
    num_tokens = count_tokens(chat) if edits else 0
    for edit in edits:
        kinds = (_TOOL_USES, _THINKING) if edit.kind == _COMPACT else (edit.kind,)
        if not _is_triggered(edit, chat, num_tokens):
            continue
        for kind in kinds:
            edited, count = (_clear_uses if kind == _TOOL_USES else _clear_thinking)(chat, edit)
            new_count = count_tokens(edited) if count else num_tokens
            cleared = num_tokens - new_count
            if count and cleared >= max(1, edit.clear_at_least):
                noun = "cleared_tool_uses" if kind == _TOOL_USES else _CLEARED_THINKING
                edit_type = edit.type if edit.kind != _COMPACT else _applied_type(kind)
                applied.append({"type": edit_type, noun: count, "cleared_input_tokens": cleared})
                chat, num_tokens = edited, new_count
    return chat, applied


def clears_thinking(applied: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the edits that `apply_edits` describes cleared thinking."""
    return any(_CLEARED_THINKING in description for description in applied)


def _parse_edit(fields: Mapping[str, Any], edit_type: str, kind: str, where: str) -> ContextEdit:
    edit = ContextEdit(edit_type, kind)
    trigger = fields.get("trigger")
    if kind == _THINKING:
        keep = fields.get("keep")
        is_all = keep == "all" or optional_mapping(keep).get("type") == "all"
        return replace(edit, keep=None if is_all else _value(keep, f"{where}.keep", 1))
    trigger_type = optional_mapping(trigger).get("type", "input_tokens")
    if trigger_type == "tool_uses" and kind == _TOOL_USES:
        edit = replace(edit, trigger_uses=_value(trigger, f"{where}.trigger", 0))
    elif trigger_type != "input_tokens":
        raise InvalidArgument(
            f"{where}.trigger.type must be input_tokens, or tool_uses of {_TOOL_USES}; found "
            f"{trigger_type!r:.100}"
        )
    else:
        default = _DEFAULT_TRIGGERS[kind]
        edit = replace(edit, trigger_tokens=_value(trigger, f"{where}.trigger", default))
    excluded = optional_list(fields.get("exclude_tools"), f"{where}.exclude_tools")
    inputs = fields.get("clear_tool_inputs") or []
    return replace(
        edit,
        keep=_value(fields.get("keep"), f"{where}.keep", 3),
        clear_at_least=_value(fields.get("clear_at_least"), f"{where}.clear_at_least", 0),
        exclude_tools=frozenset(map(str, excluded)),
        cleared_inputs=None
        if inputs is True
        else frozenset(map(str, optional_list(inputs, f"{where}.clear_tool_inputs"))),
    )


def _value(entry: Any, where: str, default: int) -> int:
    """Return the `value` of an object with `type` and `value`; the default for None."""
    if entry is None:
        return default
    value = expect_mapping(entry, where).get("value")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"{where}.value must be 0 or more; found {value!r:.100}")
    return value


def _applied_type(kind: str) -> str:
    """Return the type by which clearing for a compact edit is reported."""
    return "clear_tool_uses_20250919" if kind == _TOOL_USES else "clear_thinking_20251015"


def _is_triggered(edit: ContextEdit, chat: Chat, num_tokens: int) -> bool:
    if edit.trigger_uses is not None:
        return sum(len(message.calls) for message in chat.messages) > edit.trigger_uses
    return edit.trigger_tokens is None or num_tokens > edit.trigger_tokens


def _clear_uses(chat: Chat, edit: ContextEdit) -> tuple[Chat, int]:
    """Return the conversation without old tool results, and how many were cleared."""
    messages = chat.messages
    by_result = call_places(messages)
    cleared = [
        (result_place, call_place)
        for result_place, call_place in sorted(by_result.items(), key=lambda item: item[1])
        if messages[call_place[0]].calls[call_place[1]].name not in edit.exclude_tools
    ]
    if edit.keep:
        cleared = cleared[: -edit.keep]
    cleared = [pair for pair in cleared if not _is_cleared(messages, pair[0])]
    results = {result_place for result_place, _ in cleared}
    calls = {call_place for _, call_place in cleared}
    edited = []
    for number, message in enumerate(messages):
        parts, call_index, result_index = list[Part](), 0, 0
        for part in message.parts:
            if isinstance(part, ToolResult):
                if (number, result_index) in results:
                    part = replace(part, content=(TextPart(CLEARED),))
                result_index += 1
            elif isinstance(part, ToolCall):
                if (number, call_index) in calls and _clears_input(edit, part.name):
                    part = replace(part, arguments={})
                call_index += 1
            parts.append(part)
        edited.append(Message(message.role, tuple(parts)))
    return replace(chat, messages=tuple(edited)), len(cleared)


def _is_cleared(messages: Sequence[Message], place: tuple[int, int]) -> bool:
    return messages[place[0]].results[place[1]].content == (TextPart(CLEARED),)


def _clears_input(edit: ContextEdit, tool: str) -> bool:
    return edit.cleared_inputs is None or tool in edit.cleared_inputs


def _clear_thinking(chat: Chat, edit: ContextEdit) -> tuple[Chat, int]:
    """Return the conversation without old thinking, and of how many turns it was cleared.

    A turn is everything from one message of the user to the next one.
    """
    keep = 1 if edit.kind == _COMPACT else edit.keep
    if keep is None:
        return chat, 0
    turn, turns = 0, list[int]()  # the turn of each message
    for message in chat.messages:
        turn += message.role == "user"
        turns.append(turn)
    pairs = list(zip(chat.messages, turns, strict=True))
    thinking = sorted({number for message, number in pairs if message.reasoning})
    cleared = set(thinking[: len(thinking) - keep] if keep else thinking)
    edited = [
        without_reasoning(message) if number in cleared else message for message, number in pairs
    ]
    return replace(chat, messages=normalized(edited)), len(cleared)


def without_reasoning(message: Message) -> Message:
    """Return a message in normal form without its reasoning."""
    parts = (part for part in message.parts if not isinstance(part, ReasoningPart))
    return normalized([Message(message.role, tuple(parts))])[0]
