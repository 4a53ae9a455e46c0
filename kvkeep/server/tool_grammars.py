"""Compiling grammars of tools: the form of calls, its markers, and schemas that are supported."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.grammar import ANY_OBJECT, Grammar

_SECONDS_FOR_TOOLS = 5.0  # to find out which tools' parameters are supported


def first_supported(
    model: Model, tools: Sequence[Tool], compiled: Callable[[Sequence[Tool]], Grammar]
) -> Grammar:
    """Return the grammar of the tools; schemas that llguidance does not support are left out."""
    for usable_tools, warnings in _less_and_less_constrained(model, tools):
        try:
            grammar = compiled(usable_tools)
        except InvalidArgument as error:
            problem = error
        else:
            grammar.warnings = tuple(dict.fromkeys((*grammar.warnings, *warnings)))
            return grammar
    raise problem


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


def _less_and_less_constrained(
    model: Model, tools: Sequence[Tool]
) -> Iterator[tuple[Sequence[Tool], Sequence[str]]]:
    """Yield tools with fewer and fewer constraints of their arguments, and what is left out."""
    yield tools, ()
    usable_tools, warnings = list[Tool](), list[str]()
    deadline = time.monotonic() + _SECONDS_FOR_TOOLS
    for tool in tools:
        parameters: Mapping[str, Any] = ANY_OBJECT
        try:
            if time.monotonic() > deadline:
                raise InvalidArgument("compiling the parameters of all tools takes too long")
            grammar = Grammar.from_schema(model, tool.parameters)
        except InvalidArgument as error:
            warnings.append(f"the parameters of {tool.name} are not followed: {error}")
        else:
            parameters = grammar.schema or tool.parameters
            warnings += grammar.warnings
        usable_tools.append(replace(tool, parameters=parameters))
    yield usable_tools, warnings
    free_tools = [replace(tool, parameters=ANY_OBJECT) for tool in tools]
    yield free_tools, ["the parameters of the tools are not followed: together they are too large"]
