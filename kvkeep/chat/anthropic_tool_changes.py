"""Tools that come and go within a conversation of Anthropic's API.

Blocks of type `tool_addition` and `tool_removal` say so where it happens. The tools of the request
stay described before all messages, and a change is described in its place, so that no prompt
changes before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.chat.anthropic_tools import client_tool_names, is_hosted, parse_definition
from kvkeep.chat.fields import expect_mapping, optional_mapping, optional_text
from kvkeep.chat.late_tools import HEADING
from kvkeep.chat.messages import Tool
from kvkeep.chat.tool_schemas import tool_line

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


def ignored_changes(messages: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield what names changes without effect.

    Those are added tools that only the hosted API can run, by their types, and references to such
    ones and to unknown tools. names: of the request's tools.
    """
    known = set(names)
    for block, _ in change_blocks(messages):
        entry = optional_mapping(block.get("tool"))
        definition = optional_mapping(entry.get("definition"))
        if entry.get("type") == "tool_reference":
            if entry.get("name") not in known:
                yield f"{block['type']}.{entry.get('name')}"
        elif entry.get("type") != "tool_definition":
            yield str(entry.get("type"))
        elif is_hosted(definition):
            yield str(definition["type"])
        else:
            known |= client_tool_names([definition])


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

    tools: of its request. Of several of one name the last counts. One whose first change is an
    addition of the same definition is not described before the messages.
    """
    defined, removed = dict[str, Tool](), set[str]()
    first_changes = dict[str, ToolChange]()
    for block, where in change_blocks(messages):
        change = parse_change(block, where)
        if change is None:
            continue
        first_changes.setdefault(change.name, change)
        if change.tool is not None:
            defined[change.name] = change.tool
        (removed.discard if change.is_added else removed.add)(change.name)
    late = {change.tool for change in first_changes.values() if change.is_added}
    listed = {tool.name: replace(tool, deferred=False) for tool in tools}
    first = [replace(t, deferred=t.deferred or listed[t.name] in late) for t in tools]
    newer = [tool for name, tool in defined.items() if listed.get(name) != tool]
    return (*first, *(replace(tool, deferred=True) for tool in newer)), frozenset(removed)


def defined_tools(content: Any, where: str) -> dict[str, Tool]:
    """Return the tools that the blocks of a content define, by name. Raises InvalidArgument."""
    changes = (parse_change(*change) for change in _change_blocks_of(content, where))
    return {change.name: change.tool for change in changes if change and change.tool}


def changes_text(changes: Iterable[ToolChange], tools: Mapping[str, Tool]) -> str:
    """Return lines that describe changes. tools: those that are known, by name.

    References to others are left out.
    """
    lines, was_added = list[str](), None
    for change in changes:
        tool = change.tool or tools.get(change.name)
        if tool is None:
            continue
        if change.is_added != was_added:
            lines.append(HEADING if change.is_added else _REMOVAL_HEADING)
            was_added = change.is_added
        lines.append(tool_line(tool) if change.is_added else change.name)
    return "\n".join([*lines, ""]) if lines else ""


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
