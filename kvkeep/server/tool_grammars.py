"""Compiling grammars of tools: the form of calls, its markers, and schemas that are supported."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvkeep.chat.messages import Tool
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from kvkeep.server.limits import MAX_SCHEMA_CHARACTERS
from kvkeep.server.resolved_schemas import prepared_schema
from kvkeep.server.schema_patterns import without_unsupported_patterns

# Not every form has all of the parameters in its grammar, which has a limit of its own.
_MAX_TOGETHER = 10 * MAX_SCHEMA_CHARACTERS
_SECONDS_FOR_TOOLS = 5.0  # to find out which tools' parameters are supported


def first_supported(
    model: Model, tools: Sequence[Tool], compiled: Callable[[Sequence[Tool]], Grammar]
) -> Grammar:
    """Return the grammar of the tools; schemas that llguidance does not support are left out."""
    prepared_tools, warnings = list[Tool](), list[str]()
    for tool in tools:
        prepared, problem = _prepared(tool)
        prepared_tools.append(prepared)
        warnings += problem
    for usable_tools, further_warnings in _less_and_less_constrained(prepared_tools, compiled):
        try:
            grammar = compiled(usable_tools)
        except InvalidArgument as error:
            problem_of_all = error
        else:
            messages = (*grammar.warnings, *warnings, *further_warnings)
            grammar.warnings = tuple(dict.fromkeys(messages))
            return grammar
    raise problem_of_all


def call_form(model: Model) -> str:
    """Return the name of the format in which the model writes calls.

    A model whose chat template has no tool support gets instructions for Hermes' form.
    """
    renderer = model.renderer
    if renderer.output_format.calls and not renderer.traits.tools:
        return "hermes"
    return renderer.output_format.name


def marker_ids(model: Model) -> Mapping[str, int]:
    """Return the tokens of markers; of some models they are no control tokens."""
    added = model.text.tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items()}


def _prepared(tool: Tool) -> tuple[Tool, list[str]]:
    """Return a tool with prepared parameters, and what of these is not followed, in words."""
    try:
        return replace(tool, parameters=prepared_schema(tool.parameters)), []
    except InvalidArgument as error:
        return _without_parameters(tool, error)


def _without_parameters(tool: Tool, error: InvalidArgument) -> tuple[Tool, list[str]]:
    warning = f"the parameters of {tool.name} are not followed: {error}"
    return replace(tool, parameters=ANY_OBJECT), [warning]


def _less_and_less_constrained(
    tools: Sequence[Tool], compiled: Callable[[Sequence[Tool]], Grammar]
) -> Iterator[tuple[Sequence[Tool], Sequence[str]]]:
    """Yield tools with fewer and fewer constraints of their arguments, and what is left out."""
    if sum(len(json.dumps(tool.parameters)) for tool in tools) <= _MAX_TOGETHER:
        yield tools, ()
        yield _each_supported(tools, compiled)
    free_tools = [replace(tool, parameters=ANY_OBJECT) for tool in tools]
    yield free_tools, ["the parameters of the tools are not followed: together they are too large"]


def _each_supported(
    tools: Sequence[Tool], compiled: Callable[[Sequence[Tool]], Grammar]
) -> tuple[Sequence[Tool], Sequence[str]]:
    """Return tools without what is not supported in the grammar of one alone, and that in words."""
    usable_tools, warnings = list[Tool](), list[str]()
    deadline = time.monotonic() + _SECONDS_FOR_TOOLS
    for tool in tools:
        try:
            if tool.parameters != ANY_OBJECT and time.monotonic() > deadline:
                raise InvalidArgument("compiling the parameters of all tools takes too long")
            usable, tool_warnings = _supported(tool, compiled)
        except InvalidArgument as error:
            usable, tool_warnings = _without_parameters(tool, error)
        usable_tools.append(usable)
        warnings += tool_warnings
    return usable_tools, warnings


def _supported(tool: Tool, compiled: Callable[[Sequence[Tool]], Grammar]) -> tuple[Tool, list[str]]:
    """Return a tool without the patterns that are not supported, and what is left out.

    Raises InvalidArgument if other parts of its parameters are not supported.
    """
    try:
        if tool.parameters != ANY_OBJECT:
            compiled([tool])
        return tool, []
    except InvalidArgument:
        parameters, patterns = without_unsupported_patterns(tool.parameters)
        if not patterns:
            raise
    reduced = replace(tool, parameters=parameters)
    compiled([reduced])
    return reduced, [f"the pattern {pattern!r} is not followed" for pattern in patterns]
