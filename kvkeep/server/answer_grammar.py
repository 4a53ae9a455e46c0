"""The grammar of an answer: of a forced call, of JSON by a schema, or of either JSON or calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.chat.messages import Chat, Tool
from kvkeep.chat.renderer import RenderedPrompt
from kvkeep.model import Model
from kvkeep.server.call_grammar import (
    AllowedCalls,
    forced_call_schema,
    write_rendered_call,
)
from kvkeep.server.call_writers import WRITABLE, write_calls
from kvkeep.server.grammar import ANY_OBJECT, Grammar, compile_grammar
from kvkeep.server.lark_rules import LarkRules, compact_json, json_value
from kvkeep.server.no_calls import CallsForbidden
from kvkeep.server.reasoning_budget import reasoning_constraint
from kvkeep.server.strict_calls import StrictCalls
from kvkeep.server.strict_grammar import StrictGrammar, compile_strict
from kvkeep.server.tool_grammars import call_form, first_supported, marker_ids
from kvkeep.session.sampling import Constraint

_CHANNELS = "harmony"  # the format in whose channels calls have headers


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar of the answers to a conversation; None for any text.

    schema_calls: with a schema, the tools whose calls may be bare JSON; see `OutputReader`.
    has_header: whether the grammar includes the header of the answer's channel, if any.
    forbids_calls: whether no call may begin although the prompt describes tools. tools: those that
    may be called. strict: the grammar of calls if some are of strict tools and the text is free.
    """

    grammar: Grammar | None = None
    schema_calls: frozenset[str] | None = None
    has_header: bool = False
    forbids_calls: bool = False
    tools: tuple[Tool, ...] = ()
    strict: StrictGrammar | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The parts of the schemas that are not followed, in words."""
        grammar = self.grammar or self.strict
        return grammar.warnings if grammar else ()

    def constraint(
        self, model: Model, prompt: RenderedPrompt, reasoning_budget: int | None = None
    ) -> Constraint | None:
        """Return the constraint of one generation, or None. Reasoning before an answer is free.

        reasoning_budget: the most tokens of reasoning; None for any number.
        """
        output_format = model.renderer.output_format
        answer: Constraint | None = self.grammar and self.grammar.copy()
        if self.forbids_calls and output_format.channels:
            answer = CallsForbidden(model.text, output_format, None)  # in the channel of texts
        constraint = reasoning_constraint(
            model.text,
            output_format,
            prompt.starts_in_reasoning,
            reasoning_budget,
            answer,
            model.end_token_ids,
            self.has_header,
            self.tools,
        )
        if self.forbids_calls and not output_format.channels:
            return CallsForbidden(model.text, output_format, constraint)
        if self.strict is not None:
            in_reasoning = prompt.starts_in_reasoning
            at_start = not (in_reasoning or prompt.continues)
            arguments = model.text, output_format, self.strict, constraint
            return StrictCalls(*arguments, at_start, in_reasoning)
        return constraint


def compile_answer(
    model: Model, chat: Chat, schema: Mapping[str, Any] | None = None, gbnf: str | None = None
) -> AnswerGrammar:
    """Compile the grammar of a forced call, of a JSON schema or of GBNF; a large one takes seconds.

    Besides an answer by a schema, calls of the tools stay possible. In free text, those of strict
    tools follow their schemas. Raises InvalidArgument for an invalid schema or grammar, or for a
    combination of them.
    """
    tools = chat.callable_tools
    if chat.choice.mode == "required":
        return AnswerGrammar(
            _compile_forced_call(model, tools, gbnf), has_header=call_form(model) == _CHANNELS
        )
    if schema is None and not gbnf and not tools:
        return AnswerGrammar(forbids_calls=bool(chat.tools))
    if schema is None and not gbnf:
        return AnswerGrammar(tools=tools, strict=compile_strict(model, tools))
    if schema is None or gbnf or not tools:
        no_calls = None if schema is None else frozenset[str]()
        return AnswerGrammar(compile_grammar(model, schema, gbnf), no_calls, tools=tools)
    grammar, bare_names = compile_answer_or_calls(model, schema, tools)
    return AnswerGrammar(grammar, bare_names, has_header=True)


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
    form = call_form(model)
    if form not in WRITABLE:
        return answer, frozenset()
    bare_names = frozenset[str]()
    if form == "llama3":
        bare_names = frozenset(t.name for t in tools if _is_distinct(model, answer, schema, t.name))
    answer_schema = answer.schema or schema

    def compiled(tools: Sequence[Tool]) -> Grammar:
        rules = LarkRules(marker_ids(model), model.end_token_ids)
        calls = write_calls(form, AllowedCalls(rules, tools, bare_names))
        # Where calls are bare JSON, both have the model's own spaces, so that these decide nothing.
        text = (json_value if bare_names else compact_json)(answer_schema)
        if output_format.channels:
            text = f'{rules.marker("<|channel|>")} "final" {rules.marker("<|message|>")} {text}'
        return Grammar.from_lark(model, rules.text(f"{rules.add(text)} | {calls}"))

    grammar = first_supported(model, tools, compiled)
    grammar.warnings = (*answer.warnings, *grammar.warnings)
    return grammar, bare_names


def _compile_forced_call(model: Model, tools: Sequence[Tool], gbnf: str | None) -> Grammar | None:
    """Compile the grammar of one call, in the bytes that the chat template writes, or bare JSON.

    In channels it is a message to the tool, with its header. Parameters that are not supported are
    free.
    """
    if gbnf:
        return compile_grammar(model, forced_call_schema(tools), gbnf)  # raises
    form = model.renderer.rendered_call

    def compiled(tools: Sequence[Tool]) -> Grammar:
        rules = LarkRules(marker_ids(model), model.end_token_ids)
        if call_form(model) == _CHANNELS:
            calls = write_calls(_CHANNELS, AllowedCalls(rules, tools))
            return Grammar.from_lark(model, rules.text(calls))
        if form is None:
            return Grammar.from_prepared(model, forced_call_schema(tools))
        return Grammar.from_lark(model, rules.text(write_rendered_call(form, rules, tools)))

    return first_supported(model, tools, compiled)


def _is_distinct(model: Model, answer: Grammar, schema: Mapping[str, Any], name: str) -> bool:
    """Whether bare JSON that begins as a call of a tool is one.

    It is the answer if the schema allows it, unless it allows any object.
    """
    beginning = f'{{"name":{json.dumps(name, ensure_ascii=False)},"parameters":{{'
    return schema == ANY_OBJECT or not answer.allows(model.text.encode(beginning))
