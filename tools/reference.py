"""Reference pages of the site that are made of the program: its commands and its HTTP API."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import Mock

import click

from kvkeep.cli.main import main
from kvkeep.server.app import application
from kvkeep.server.notices import NoticesMiddleware

_WIDTH = 92
_BOUNDS = ("minimum", "maximum")
_LARGE = 1 << 31  # bounds beyond that are those of numbers, not of a field
_COMMANDS = """# All commands

The help of every command, as `kvkeep COMMAND --help` prints it.
[The command line](command-line.md) explains them with examples.
"""
_API = """# HTTP API

Every route of `kvkeep serve` with its parameters and the fields of its body, from the server's
own OpenAPI document (`/openapi.json`). [Serve](serving.md) explains how to use them.

Errors are `{"error": {"message", "type", "param", "code"}}` with one of these statuses:
"""
# The APIs in the order of the page: their title, and the beginnings of their routes.
_GROUPS = {
    "OpenAI": ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/models"),
    "Anthropic": ("/v1/messages",),
    "Sessions": ("/v1/sessions",),
    "Snapshots": ("/v1/snapshots",),
    "Events and operations": ("/v1/events", "/v1/operations"),
    "Prefix cache": ("/v1/prefix",),
    "llama.cpp, health and metrics": ("/",),
}


def commands_page() -> str:
    """Return the page with the help of every command."""
    return "\n".join([_COMMANDS, *_help_sections(main, "kvkeep", None)])


def _help_sections(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[str]:
    settings = {**main.context_settings, "terminal_width": _WIDTH} if parent is None else {}
    info_name = name.rpartition(" ")[2]
    with click.Context(command, info_name=info_name, parent=parent, **settings) as context:
        yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                yield from _help_sections(found, f"{name} {child}", context)


def api_page() -> str:
    """Return the page with every route of the server."""
    wrapped: list[NoticesMiddleware] = []
    application(Mock(), middleware=lambda app: wrapped.append(app) or app)
    document = wrapped[0].app.app.openapi()
    schemas = document["components"]["schemas"]
    parts, left = [_API, _statuses(document)], dict(document["paths"])
    for title, beginnings in _GROUPS.items():
        parts.append(f"## {title}\n")
        for path in [path for path in left if path.startswith(beginnings)]:
            for method, operation in left.pop(path).items():
                parts += _operation(f"{method.upper()} {path}", operation, schemas)
    return "\n".join(parts)


def _statuses(document: Mapping[str, Any]) -> str:
    statuses = {
        status: response["description"]
        for path in document["paths"].values()
        for operation in path.values()
        for status, response in operation["responses"].items()
        if status >= "400"
    }
    rows = [f"| {status} | {text} |" for status, text in sorted(statuses.items())]
    return "\n".join(["| Status | |", "|---|---|", *rows, ""])


def _operation(
    title: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"### `{title}`\n\n{operation.get('description', '')}\n"
    rows = [
        (p["name"], p["in"], p["schema"], p.get("required", False), p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    content = operation.get("requestBody", {}).get("content", {})
    for body in content.values():
        schema = _resolved(body["schema"], schemas)
        required = schema.get("required", [])
        for name, field in schema.get("properties", {}).items():
            rows.append((name, "body", field, name in required, field.get("description", "")))
    if not rows:
        return
    described = any(row[-1] for row in rows)
    yield "| Field | In | Type |" + " Meaning |" * described
    yield "|---|---|---|" + "---|" * described
    for name, place, field, required, text in rows:
        type_name = _type_name(field, schemas).replace("|", "\\|")
        type_name += "" if required else _default(field)
        yield f"| `{name}` | {place} | {type_name} |" + f" {_first_sentence(text)} |" * described
    yield ""


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return ", optional" if default is None else f", default `{default}`"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".").replace("|", "\\|")


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref", "").rpartition("/")[2]
    return schemas[reference] if reference else schema


def _type_name(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return the type of a field in words, with its range."""
    field = _resolved(field, schemas)
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        names = [_type_name(option, schemas) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    name = field.get("type", "any")
    if name == "array":
        return f"array of {_type_name(field.get('items', {}), schemas)}"
    least, most = (field.get(bound, field.get(f"exclusive{bound.title()}")) for bound in _BOUNDS)
    if least is None or least < -_LARGE:
        return str(name)
    if most is None or most > _LARGE:
        return f"{name}, at least {least:,.10g}"
    return f"{name}, {least:,.10g} to {most:,.10g}"
