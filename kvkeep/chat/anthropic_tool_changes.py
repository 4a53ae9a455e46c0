"""Tools that come and go within a conversation of Anthropic's API.

Blocks of type `tool_addition` and `tool_removal` say so where it happens. The tools of the request
stay described before all messages, and a change is described in its place, so that no prompt
changes before it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.chat.anthropic_tools import is_hosted, parse_definition
from kvkeep.chat.fields import expect_mapping, optional_mapping, optional_text
from kvkeep.chat.late_tools import HEADING
from kvkeep.chat.messages import Tool
from kvkeep.chat.tool_schemas import function_fields

_ADDITION, _REMOVAL = "tool_addition", "tool_removal"
CHANGE_TYPES = (_ADDITION, _REMOVAL)
_REMOVAL_HEADING = "From here on these functions can no longer be called:"


@dataclass(frozen=True)
class ToolChange:
    """A tool that is added or removed. tool: its definition, if the change has one."""

    name: str
    is_added: bool
    tool: Tool | None = None


def parse_change(block: Mapping[str, Any], where: str) -> ToolChange | None:
    """Return what a block changes; None for a tool that the hosted API runs.

    Raises InvalidArgument.
    """
    entry = expect_mapping(block.get("tool"), f"{where}.tool")
    is_added = block["type"] == _ADDITION
    if entry.get("type") == "tool_definition":
        tool = parse_definition(entry.get("definition"), f"{where}.tool.definition")
        return None if tool is None else ToolChange(tool.name, is_added, tool)
    if entry.get("type") == "tool_reference":
        return ToolChange(optional_text(entry, "name", f"{where}.tool"), is_added)
    return None


def parse_changes(blocks: Any, where: str) -> list[ToolChange]:
    """Return what several blocks change. Raises as `parse_change`."""
    changes = (parse_change(block, where) for block in only_changes(blocks))
    return [change for change in changes if change is not None]


def hosted_changes(messages: Any) -> Iterator[str]:
    """Yield the types of added tools that only the hosted API can run, and of its references."""
    for block, _ in change_blocks(messages):
        entry = optional_mapping(block.get("tool"))
        definition = optional_mapping(entry.get("definition"))
        if entry.get("type") == "tool_definition" and is_hosted(definition):
            yield str(definition["type"])
        elif entry.get("type") not in ("tool_definition", "tool_reference"):
            yield str(entry.get("type"))


def change_blocks(messages: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the blocks of a conversation that change its tools, and their places in words."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = optional_mapping(message).get("content")
        yield from _change_blocks_of(content, f"messages[{index}].content")


def _change_blocks_of(blocks: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        block_where, kind = f"{where}[{index}]", optional_mapping(block).get("type")
        if kind in CHANGE_TYPES:
            yield block, block_where
        elif is_summary(block):
            yield from _change_blocks_of(block.get("tool_changes"), f"{block_where}.tool_changes")


def is_summary(block: Any) -> bool:
    """Whether a block stands for what was before it. One without content stands for nothing."""
    fields = optional_mapping(block)
    content = fields.get("content")
    has_content = bool(content.strip() if isinstance(content, str) else content)
    return fields.get("type") == "compaction" and has_content


def only_changes(blocks: Any) -> list[Any]:
    """Return the blocks of a content that change tools."""
    entries = blocks if isinstance(blocks, list) else ()
    return [block for block in entries if optional_mapping(block).get("type") in CHANGE_TYPES]


def changed_tools(tools: Sequence[Tool], messages: Any) -> tuple[tuple[Tool, ...], frozenset[str]]:
    """Return the tools of a whole conversation, and the names of those that are removed in the end.

    tools: of its request. A tool that is defined again has its newest definition.
    """
    defined, removed = dict[str, Tool](), set[str]()
    for block, where in change_blocks(messages):
        change = parse_change(block, where)
        if change is None:
            continue
        if change.tool is not None:
            defined[change.name] = change.tool
        (removed.discard if change.is_added else removed.add)(change.name)
    kept = [replace(defined.get(tool.name, tool), deferred=tool.deferred) for tool in tools]
    names = {tool.name for tool in tools}
    new = [replace(tool, deferred=True) for name, tool in defined.items() if name not in names]
    return (*kept, *new), frozenset(removed)


def changes_text(changes: Iterable[ToolChange], tools: Mapping[str, Tool]) -> str:
    """Return lines that describe changes. tools: those that a reference can refer to, by name."""
    lines, was_added = list[str](), None
    for change in changes:
        if change.is_added != was_added:
            lines.append(HEADING if change.is_added else _REMOVAL_HEADING)
            was_added = change.is_added
        tool = change.tool or tools.get(change.name) if change.is_added else None
        lines.append(tool_line(tool) if tool else change.name)
    return "\n".join([*lines, ""]) if lines else ""


def tool_line(tool: Tool) -> str:
    """Return a tool's definition as a line of JSON."""
    return json.dumps(function_fields(tool), ensure_ascii=False)


def last_changes(messages: Any) -> list[dict[str, Any]]:
    """Return the last change of each tool of a conversation, as a `compaction` block has them.

    An addition has the definition of an earlier one that it refers to.
    """
    by_name, definitions = dict[str, dict[str, Any]](), dict[str, Any]()
    for block, where in change_blocks(messages):
        change = parse_change(block, where)
        if change is None:
            continue
        tool = block["tool"]
        if change.tool is not None:
            definitions[change.name] = tool
        elif change.is_added:
            tool = definitions.get(change.name, tool)
        by_name.pop(change.name, None)
        by_name[change.name] = {"type": block["type"], "tool": tool}
    return list(by_name.values())
