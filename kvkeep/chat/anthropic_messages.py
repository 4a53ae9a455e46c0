"""Conversations in the form of Anthropic's Messages API, to and from the normal form.

The API has no custom tools and namespaces, so that both become plain functions, and of several
allowed tools it can name only one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from kvkeep.chat.anthropic_blocks import format_parts, parse_blocks
from kvkeep.chat.anthropic_history import HistoryEntry, entries_in_force
from kvkeep.chat.anthropic_tool_changes import (
    changed_tools,
    defined_tools,
    is_summary,
    only_changes,
)
from kvkeep.chat.anthropic_tools import format_choice, format_tool, parse_choice, parse_tools
from kvkeep.chat.fields import optional_mapping
from kvkeep.chat.messages import (
    Chat,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    normalized,
)
from kvkeep.chat.output import GeneratedCall, Output
from kvkeep.errors import InvalidArgument

SIGNATURE = "kvkeep"  # of thinking; some clients drop thinking without one
_SUMMARY_HEADING = "The conversation so far, in summary:\n\n"
_ROLES = ("user", "assistant", "system")


def parse_chat(body: Mapping[str, Any]) -> Chat:
    """Return the conversation of a request: its `system`, `messages`, `tools` and `tool_choice`.

    Tools that only the hosted API can run are left out: see `hosted_tools`. Raises InvalidArgument.
    """
    entries = body.get("messages")
    listed = parse_tools(body.get("tools"))
    tools, removed = changed_tools(listed, entries)
    known = {tool.name: tool for tool in listed}
    messages = list[Message]()
    if system := body.get("system"):
        messages.append(Message("system", tuple(parse_blocks(system, "system", known))))
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"messages must be a list of messages; found {entries!r:.100}")
    for entry in entries_in_force(entries):
        content = optional_mapping(entry.message).get("content")
        known |= defined_tools(content, f"messages[{entry.number}].content")
        messages += _parse_message(entry, known)
    available = tuple(tool for tool in tools if tool.name not in removed)
    choice = parse_choice(body.get("tool_choice"), body.get("tools"), available)
    if len(available) < len(tools) and choice.mode != "none" and choice.names is None:
        choice = replace(choice, names=tuple(dict.fromkeys(tool.name for tool in available)))
    return Chat(normalized(messages or [Message("user")]), tools, choice)


def format_chat(chat: Chat) -> dict[str, Any]:
    """Return a conversation as the fields of a request."""
    fields: dict[str, Any] = {}
    messages = chat.messages
    if len(messages) > 1 and messages[0].role == "system" and messages[0].parts:
        fields["system"] = format_parts(messages[0].parts)
        messages = messages[1:]
    fields["messages"] = [
        {
            "role": "user" if message.role == "tool" else message.role,
            "content": format_parts(message.parts),
        }
        for message in messages
    ]
    if chat.tools:
        fields["tools"] = [format_tool(tool) for tool in chat.tools]
    if chat.choice != ToolChoice():
        fields["tool_choice"] = format_choice(chat.choice)
    return fields


def format_output(output: Output) -> list[dict[str, Any]]:
    """Return an answer as content blocks; at least one, of empty text."""
    blocks = format_parts(
        part.message_part() if isinstance(part, GeneratedCall) else part for part in output.parts
    )
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
    return blocks or [{"type": "text", "text": ""}]


def _parse_message(entry: HistoryEntry, tools: Mapping[str, Tool]) -> list[Message]:
    """Return an entry as messages: one for each run of parts of one role."""
    where = f"messages[{entry.number}]"
    role = optional_mapping(entry.message).get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}: role must be user or assistant; found {role!r:.100}")
    content, is_answer = entry.message.get("content"), role == "assistant"
    if is_answer and _has_compaction(content):
        return _with_summaries(content, f"{where}.content", tools, entry.start)
    parts = parse_blocks(content, f"{where}.content", tools, is_answer, entry.start)
    is_silent = role == "system" or len(only_changes(content)) == len(content or ())
    if is_silent and not parts and isinstance(content, list) and content:
        return []  # such as a change of a tool that only the hosted API can run
    if role == "user":  # results belong to the calls of the message before
        parts.sort(key=lambda part: not isinstance(part, ToolResult))
    runs = groupby(parts, key=lambda part: _part_role(part, role))
    return [Message(run_role, tuple(run)) for run_role, run in runs] or [Message(role)]


def _is_compaction(block: Any) -> bool:
    return bool(optional_mapping(block).get("type") == "compaction")


def _has_compaction(content: Any) -> bool:
    return isinstance(content, list) and any(map(_is_compaction, content))


def _with_summaries(
    blocks: Sequence[Any], where: str, tools: Mapping[str, Tool], start: int
) -> list[Message]:
    """Return an answer with a summary of what was before it, which becomes a user's message.

    As the assistant's, a summary at the end would be continued, and not answered. start: the index
    of the first block. Summaries without content are left out.
    """
    messages = list[Message]()
    for is_compaction, group in groupby(blocks, _is_compaction):
        run = list(group)
        parts = parse_blocks(run, where, tools, not is_compaction, start)
        start += len(run)
        if any(map(is_summary, run)):
            messages.append(Message("user", (TextPart(_SUMMARY_HEADING), *parts)))
        elif not is_compaction:
            runs = groupby(parts, key=lambda part: _part_role(part, "assistant"))
            messages += [Message(role, tuple(parts)) for role, parts in runs]
    return messages


def _part_role(part: Part, message_role: Role) -> Role:
    if isinstance(part, ToolResult):
        return "tool"
    return "assistant" if isinstance(part, (ToolCall, ReasoningPart)) else message_role
