"""Tools and tool choices of OpenAI's APIs: in chats nested below their type, in responses flat.

Tools that OpenAI's servers run, such as web search, are left out. Those that the client runs but
does not describe, such as a local shell, become functions. A namespace's tools become functions
whose names begin with the namespace's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.chat.fields import expect_mapping, optional_list, optional_mapping, optional_text
from kvkeep.chat.messages import NAMESPACE_SEPARATOR, Tool, ToolChoice
from kvkeep.chat.output import parse_arguments
from kvkeep.chat.tool_schemas import canonical_schema
from kvkeep.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TOOL_SEARCH = "tool_search"  # a tool, by the client or the server, that finds deferred tools
_OWN_TYPES = ("function", "custom", "namespace")
_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_COMMANDS = {"type": "array", "items": _TEXT}
CLIENT_TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "local_shell",
            "Run a command on the user's computer and return its output.",
            _object(["command"], command=_COMMANDS, working_directory=_TEXT, timeout_ms=_NUMBER),
        ),
        Tool(
            "shell",
            "Run shell commands and return their output.",
            _object(["commands"], commands=_COMMANDS, timeout_ms=_NUMBER),
        ),
        Tool(
            "apply_patch",
            "Create, update or delete a file. A diff is in the V4A format, without file headers.",
            {
                **_object(
                    ["type", "path"],
                    type={"enum": ["create_file", "update_file", "delete_file"]},
                    path=_TEXT,
                    diff=_TEXT,
                ),
                "anyOf": [
                    {"required": ["diff"]},
                    {"properties": {"type": {"const": "delete_file"}}},
                ],
            },
        ),
    )
}


def parse_tools(
    entries: Any, where: str = "tools", has_search: bool | None = None
) -> tuple[Tool, ...]:
    """Return the tools that the model can be offered. Raises InvalidArgument.

    Those with `defer_loading` are deferred if the client runs a search for them. has_search:
    whether it does; None to look among the entries.
    """
    tools: dict[str, Tool] = {}
    deferring = TOOL_SEARCH in client_types(entries) if has_search is None else has_search
    for index, entry in enumerate(optional_list(entries, where)):
        for tool in _parse_entry(entry, f"{where}[{index}]"):
            deferred = tool.deferred and deferring
            tools.setdefault(tool.name, replace(tool, deferred=deferred))
    return tuple(tools.values())


def client_types(entries: Any) -> list[str]:
    """Return the types of the tools that the client runs, and that are no functions."""
    return [kind for kind in map(_client_type, optional_list(entries, "tools")) if kind]


def parse_functions(entries: Any) -> tuple[Tool, ...]:
    """Return the tools of the deprecated field `functions`. Raises InvalidArgument."""
    functions = optional_list(entries, "functions")
    return tuple(
        _parse_tool(entry, "function", f"functions[{index}]")
        for index, entry in enumerate(functions)
    )


def hosted_tools(entries: Any) -> list[str]:
    """Return the types of the tools that only OpenAI's servers can run."""
    kinds = [
        optional_mapping(entry).get("type")
        for entry in optional_list(entries, "tools")
        if not _client_type(entry)
    ]
    return [kind for kind in kinds if isinstance(kind, str) and kind not in _OWN_TYPES]


def parse_choice(
    value: Any, tools: Sequence[Tool], where: str = "tool_choice", has_hosted: bool = False
) -> ToolChoice:
    """Return the choice among these tools. Raises InvalidArgument.

    A hosted tool that must be called is left to the model, since it is not among the tools; so is
    a call that only hosted tools could answer. has_hosted: whether the request has hosted tools.
    """
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value in ("required", "any"):
        if has_hosted and not tools:
            return ToolChoice()
        return ToolChoice("required", _existing(None, tools, where))
    choice = optional_mapping(value)
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _parse_allowed(choice, tools, where)
    if not isinstance(kind, str) or not choice:
        raise InvalidArgument(
            f'{where} must be "auto", "none", "required" or an object that names a tool; '
            f"found {value!r:.100}"
        )
    if kind in ("auto", "none", "required"):
        return parse_choice(kind, tools, where, has_hosted)
    if _is_hosted(kind):
        return ToolChoice()
    return ToolChoice("required", _existing([_chosen_name(choice, tools)], tools, where))


def joined_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a tool of a namespace."""
    return f"{namespace.rstrip('_')}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def own_name(name: str, namespace: str) -> str:
    """Return the name that a tool has in its namespace."""
    return name.removeprefix(joined_name(namespace, "")) if namespace else name


def custom_parameters(input_format: Any = None) -> dict[str, Any]:
    """Return the parameters by which the model sees a custom tool: one text, "input"."""
    details = optional_mapping(input_format)
    details = {**details, **optional_mapping(details.get("grammar"))}
    definition, syntax = details.get("definition"), details.get("syntax")
    text = dict(_TEXT)
    if isinstance(definition, str) and definition:
        text["description"] = f"Text of this {syntax or 'context-free'} grammar:\n{definition}"
    return _object(["input"], input=text)


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with; the arguments where there is none."""
    value = parse_arguments(arguments).get("input")
    return value if isinstance(value, str) else arguments


def _parse_entry(entry: Any, where: str) -> Iterator[Tool]:
    kind = expect_mapping(entry, where).get("type", "function")
    if not isinstance(kind, str):
        raise InvalidArgument(f"{where}.type must be text; found {kind!r:.100}")
    if kind in ("function", "custom"):
        nested = entry.get(kind)
        place = where if nested is None else f"{where}.{kind}"
        yield _parse_tool(entry if nested is None else nested, kind, place)
    elif kind == "namespace":
        namespace = _parse_name(entry, where)
        for index, member in enumerate(optional_list(entry.get("tools"), f"{where}.tools")):
            member_where = f"{where}.tools[{index}]"
            kind = expect_mapping(member, member_where).get("type", "function")
            if kind in ("function", "custom"):
                yield _parse_tool(member, kind, member_where, namespace)
    elif _client_type(entry) == TOOL_SEARCH:
        yield _parse_tool({**entry, "name": TOOL_SEARCH}, "function", where)
    elif kind in CLIENT_TOOLS:
        yield CLIENT_TOOLS[kind]


def _client_type(entry: Any) -> str:
    """Return an entry's type if it is a tool that the client runs, and no function."""
    kind = optional_mapping(entry).get("type")
    if kind == TOOL_SEARCH and entry.get("execution") == "client":
        return TOOL_SEARCH
    return kind if isinstance(kind, str) and kind in CLIENT_TOOLS else ""


def _parse_tool(entry: Any, kind: Any, where: str, namespace: str = "") -> Tool:
    fields = expect_mapping(entry, where)
    name = joined_name(namespace, _parse_name(fields, where))
    description = optional_text(fields, "description", where)
    deferred = bool(fields.get("defer_loading"))
    if kind == "custom":
        parameters = custom_parameters(fields.get("format"))
        return Tool(name, description, parameters, "custom", namespace, deferred)
    schema = fields.get("parameters")
    if schema is not None:
        expect_mapping(schema, f"{where}.parameters")
    schema_fields = {"parameters": canonical_schema(schema)} if schema else {}
    strict = fields.get("strict") is True
    return Tool(
        *(name, description), namespace=namespace, deferred=deferred, strict=strict, **schema_fields
    )


def _parse_name(fields: Mapping[str, Any], where: str) -> str:
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{where}.name must have 1 to 128 letters, digits, '_', '.' and '-'; "
            f"found {name!r:.100}"
        )
    return name


def _parse_allowed(choice: Mapping[str, Any], tools: Sequence[Tool], where: str) -> ToolChoice:
    allowed = {**choice, **optional_mapping(choice.get("allowed_tools"))}
    entries = optional_list(allowed.get("tools"), f"{where}.tools")
    chosen = {_chosen_name(optional_mapping(entry), tools) for entry in entries}
    names = tuple(tool.name for tool in tools if tool.name in chosen)
    if allowed.get("mode", "auto") == "auto":
        return ToolChoice("auto", names)
    if allowed["mode"] != "required":
        raise InvalidArgument(
            f'{where}.mode must be "auto" or "required"; found {allowed["mode"]!r:.100}'
        )
    if not names and any(_is_hosted(optional_mapping(entry).get("type")) for entry in entries):
        return ToolChoice("auto", names)
    return ToolChoice("required", _existing(names, tools, where))


def _is_hosted(kind: Any) -> bool:
    """Whether a choice of this type names a tool that only OpenAI's servers run."""
    own_kinds = ("function", "custom", TOOL_SEARCH, *CLIENT_TOOLS)
    return isinstance(kind, str) and kind not in own_kinds


def _chosen_name(choice: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    """Return the full name of a tool that a choice names, with or without its namespace."""
    kind = str(choice.get("type", "function"))
    fields = {**choice, **optional_mapping(choice.get(kind))}
    name, namespace = str(fields.get("name", kind)), str(fields.get("namespace") or "")
    names = [tool.name for tool in tools if own_name(tool.name, tool.namespace) == name]
    full_name = joined_name(namespace, name)
    return full_name if full_name in {tool.name for tool in tools} or not names else names[0]


def _existing(
    names: Sequence[str] | None, tools: Sequence[Tool], where: str
) -> tuple[str, ...] | None:
    """Return names of which a tool must be called; raise InvalidArgument if none exists."""
    existing = [tool.name for tool in tools]
    if not set(existing if names is None else names) & set(existing):
        raise InvalidArgument(f"{where}: there is no such tool; the tools are {existing!s:.300}")
    return None if names is None else tuple(names)
