"""The grammar of an answer that is either JSON by a schema or calls of tools."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat
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
        rules = LarkRules(_marker_ids(model, output_format), model.end_token_ids)
        calls = write_calls(form, AllowedCalls(rules, tools, bare_names))
        # Where calls are bare JSON, both have the model's own spaces, so that these decide nothing.
        text = (json_value if bare_names else compact_json)(answer_schema)
        if output_format.channels:
            text = f'{rules.marker("<|channel|>")} "final" {rules.marker("<|message|>")} {text}'
        return Grammar.from_lark(model, rules.text(f"{rules.add(text)} | {calls}"))

    warnings = answer.warnings
    try:
        grammar = compiled(tools)
    except InvalidArgument:
        tools, reasons = _with_supported_parameters(model, tools)
        grammar, warnings = compiled(tools), (*warnings, *reasons)
    grammar.warnings = warnings
    return grammar, bare_names


def _call_form(model: Model) -> str:
    """Return the name of the format in which the model writes calls.

    A model whose chat template knows no tools is told to write Hermes' form.
    """
    renderer = model.renderer
    if renderer.output_format.calls and not renderer.traits.tools:
        return "hermes"
    return renderer.output_format.name


def _marker_ids(model: Model, output_format: OutputFormat) -> Callable[[str], int | None]:
    def marker_id(marker: str) -> int | None:
        if marker not in output_format.control_markers:
            return None
        token: int | None = model.text.tokenizer.token_to_id(marker)
        return token

    return marker_id


def _is_distinct(model: Model, answer: Grammar, schema: Mapping[str, Any], name: str) -> bool:
    """Whether bare JSON that begins as a call of a tool is one.

    It is the answer if the schema allows it, unless it allows any object.
    """
    beginning = f'{{"name":{json.dumps(name, ensure_ascii=False)},"parameters":{{'
    return schema == ANY_OBJECT or not answer.allows(model.text.encode(beginning))


def _with_supported_parameters(model: Model, tools: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    """Return tools with the parts of their schemas that are supported, and what is left out."""
    result, warnings = list[Tool](), list[str]()
    for tool in tools:
        parameters: Mapping[str, Any] = ANY_OBJECT
        try:
            grammar = Grammar.from_schema(model, tool.parameters)
        except InvalidArgument as error:
            warnings.append(f"the parameters of {tool.name} are not followed: {error}")
        else:
            parameters = grammar.schema or tool.parameters
            warnings += grammar.warnings
        result.append(replace(tool, parameters=parameters))
    return result, warnings
