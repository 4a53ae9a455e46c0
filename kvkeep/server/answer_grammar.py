"""The grammar of an answer that is either JSON by a schema or calls of tools."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.call_grammar import WRITABLE, AllowedCalls, write_calls
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from kvkeep.server.lark_rules import LarkRules, compact_json, json_value


def compile_answer_or_calls(
    model: Model, schema: Mapping[str, Any], tools: Sequence[Tool]
) -> tuple[Grammar, frozenset[str]]:
    """Compile the grammar of an answer that is JSON by a schema, or at least one call.

    Returns it, and the names of the tools whose calls are bare JSON: see `OutputReader`. A tool
    whose parameters are not supported gets any arguments. Raises InvalidArgument for an invalid
    schema.
    """
    answer = Grammar.from_schema(model, schema)
    output_format = model.renderer.output_format
    form = _call_form(model)
    if form not in WRITABLE:
        return answer, frozenset()
    bare_names = frozenset[str]()
    if form == "llama3":
        bare_names = frozenset(t.name for t in tools if _is_distinct(model, answer, schema, t.name))
    answer_schema = answer.schema or schema

    def compiled(tools: Sequence[Tool]) -> Grammar:
        rules = LarkRules(_marker_ids(model), model.end_token_ids)
        calls = write_calls(form, AllowedCalls(rules, tools, bare_names))
        # Where calls are bare JSON, both have the model's own spaces, so that these decide nothing.
        text = (json_value if bare_names else compact_json)(answer_schema)
        if output_format.channels:
            text = f'{rules.marker("<|channel|>")} "final" {rules.marker("<|message|>")} {text}'
        return Grammar.from_lark(model, rules.text(f"{rules.add(text)} | {calls}"))

    for usable_tools, warnings in _less_and_less_constrained(model, tools):
        try:
            grammar = compiled(usable_tools)
        except InvalidArgument as error:
            problem = error
        else:
            grammar.warnings = (*answer.warnings, *warnings)
            return grammar, bare_names
    raise problem


def _call_form(model: Model) -> str:
    """Return the name of the format in which the model writes calls.

    A model whose chat template knows no tools is told to write Hermes' form.
    """
    renderer = model.renderer
    if renderer.output_format.calls and not renderer.traits.tools:
        return "hermes"
    return renderer.output_format.name


def _marker_ids(model: Model) -> Callable[[str], int | None]:
    """Return the function of the token of a marker; of some models it is no control token."""
    added = model.text.tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items()}.get


def _is_distinct(model: Model, answer: Grammar, schema: Mapping[str, Any], name: str) -> bool:
    """Whether bare JSON that begins as a call of a tool is one.

    It is the answer if the schema allows it, unless it allows any object.
    """
    beginning = f'{{"name":{json.dumps(name, ensure_ascii=False)},"parameters":{{'
    return schema == ANY_OBJECT or not answer.allows(model.text.encode(beginning))


def _less_and_less_constrained(
    model: Model, tools: Sequence[Tool]
) -> Iterator[tuple[Sequence[Tool], Sequence[str]]]:
    """Yield tools with fewer and fewer constraints of their arguments, and what is left out."""
    yield tools, ()
    usable_tools, warnings = list[Tool](), list[str]()
    for tool in tools:
        parameters: Mapping[str, Any] = ANY_OBJECT
        try:
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
