"""Tools and tool choices of Anthropic's API.

Tools that Anthropic's servers run, such as web search, are left out. Those that the client runs but
does not describe, such as its shell, become functions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvkeep.chat.fields import expect_mapping, optional_list, optional_mapping, optional_text
from kvkeep.chat.messages import Tool, ToolChoice
from kvkeep.chat.tool_schemas import canonical_schema
from kvkeep.errors import InvalidArgument

_MODES: Mapping[Any, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HOSTED_SEARCH = "tool_search_tool"  # the beginning of the types of the hosted API's tool search
_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}
_EDITS: dict[str, Any] = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": _NUMBER},
}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required]}


# By the beginning of their types, which end with a date.
_CLIENT_TOOLS: Mapping[str, Tool] = {
    "bash_": Tool(
        "bash",
        "Run a command in the user's shell, which stays open, and return its output.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": Tool(
        "str_replace_based_edit_tool",
        "View, create and edit text files.",
        _object("command", command={"enum": ["view", "create", "str_replace", "insert"]}, **_EDITS),
    ),
    "memory_": Tool(
        "memory",
        "View, create, edit, delete and rename the files below /memories.",
        _object(
            "command",
            command={"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


def parse_tools(entries: Any) -> tuple[Tool, ...]:
    """Return the tools that the client runs. Raises InvalidArgument.

    Those with `defer_loading` are deferred, unless the hosted API's tool search was to find them.
    """
    hosted_types = [str(entry["type"]) for entry in hosted_tools(entries)]
    deferring = not any(kind.startswith(_HOSTED_SEARCH) for kind in hosted_types)
    return tuple(
        _parse_tool(entry, f"tools[{index}]", deferring)
        for index, entry in enumerate(entries or ())
        if not is_hosted(entry)
    )


def hosted_tools(entries: Any) -> list[Mapping[str, Any]]:
    """Return the tools that only Anthropic's servers can run."""
    return [entry for entry in optional_list(entries, "tools") if is_hosted(entry)]


def client_tool_names(entries: Any) -> set[str]:
    """Return the names of the tools that the client runs."""
    return {_name(entry) for entry in entries or () if not is_hosted(entry)}


def allows_parallel_calls(tool_choice: Any) -> bool:
    """Whether the model may make several calls in one answer."""
    return not optional_mapping(tool_choice).get("disable_parallel_tool_use")


def _client_tool(entry: Any) -> Tool | None:
    """Return a tool that the client runs and the API describes."""
    kind = str(optional_mapping(entry).get("type"))
    tools = (tool for prefix, tool in _CLIENT_TOOLS.items() if kind.startswith(prefix))
    return next(tools, None)


def is_hosted(entry: Any) -> bool:
    """Whether only Anthropic's servers can run a tool."""
    kind = optional_mapping(entry).get("type")
    is_own = kind in ("custom", "function") or _client_tool(entry) is not None
    return isinstance(kind, str) and not is_own


def parse_definition(entry: Any, where: str) -> Tool | None:
    """Return one tool that the client runs; None for a hosted one. Raises InvalidArgument."""
    return None if is_hosted(entry) else _parse_tool(entry, where, deferring=False)


def _name(entry: Any) -> Any:
    known = _client_tool(entry)
    return optional_mapping(entry).get("name", known and known.name)


def _parse_tool(entry: Any, where: str, deferring: bool) -> Tool:
    known, name = _client_tool(entry), _name(entry)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{where}.name must have 1 to 128 letters, digits, '_', '.' and '-'; "
            f"found {name!r:.100}"
        )
    description, schema = optional_text(entry, "description", where), entry.get("input_schema")
    if schema is not None:
        expect_mapping(schema, f"{where}.input_schema")
    deferred = deferring and bool(entry.get("defer_loading"))
    if known is not None:
        return replace(known, name=name, deferred=deferred)
    fields: dict[str, Any] = {"parameters": canonical_schema(schema)} if schema else {}
    strict = entry.get("strict") is True
    return Tool(name, description, deferred=deferred, strict=strict, **fields)


def parse_choice(value: Any, entries: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice among these tools. Raises InvalidArgument.

    entries: all tools of the request. A hosted tool that must be called is left to the model.
    """
    if value is None:
        return ToolChoice()
    kind = optional_mapping(value).get("type")
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidArgument(
            f"tool_choice.type must be auto, any, tool or none; found {value!r:.100}"
        )
    if _MODES[kind] != "required":
        return ToolChoice(_MODES[kind])
    chosen = (str(value.get("name")),) if kind == "tool" else None
    names = [tool.name for tool in tools]
    if set(names if chosen is None else chosen) & set(names):
        return ToolChoice("required", chosen)
    hosted = [tool.get("name") for tool in hosted_tools(entries)]
    if hosted and (chosen is None or chosen[0] in hosted):
        return ToolChoice()
    raise InvalidArgument(f"tool_choice: there is no such tool; the tools are {names}")


def format_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as an entry of `tools`."""
    fields: dict[str, Any] = {"name": tool.name, "input_schema": tool.parameters}
    if tool.description:
        fields["description"] = tool.description
    if tool.strict:
        fields["strict"] = True
    return {**fields, "defer_loading": True} if tool.deferred else fields


def format_choice(choice: ToolChoice) -> dict[str, Any]:
    """Return the choice; the API cannot express several allowed tools, which become all tools."""
    if choice.mode != "required":
        return {"type": choice.mode}
    if choice.names and len(choice.names) == 1:
        return {"type": "tool", "name": choice.names[0]}
    return {"type": "any"}
