"""Grammars of calls that a model makes of its own accord, for tools that are strict."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

from kvkeep.chat.messages import Tool
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.call_grammar import AllowedCalls, object_schema, write_bare_calls
from kvkeep.server.call_writers import write_calls
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from kvkeep.server.lark_rules import LarkRules, json_value
from kvkeep.server.tool_grammars import call_form, first_supported, marker_ids

_MAX_GRAMMARS = 8  # that are kept for a model


@dataclass(frozen=True)
class StrictGrammar:
    """Grammars of calls of some tools, of which some are strict.

    calls: of calls from the marker on that begins them; None if there is none. bare_calls: of calls
    without a marker, at the start of an answer. arguments: in channels, of each strict tool's
    arguments. marker_ids: the tokens of markers; others are plain text.
    """

    tools: Sequence[Tool]
    calls: Grammar | None = None
    bare_calls: Grammar | None = None
    arguments: Mapping[str, Grammar] = field(default_factory=dict)
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # what of the schemas is not followed, in words


_kept: "WeakKeyDictionary[Model, OrderedDict[str, StrictGrammar]]" = WeakKeyDictionary()
_lock = Lock()


def compile_strict(model: Model, tools: Sequence[Tool]) -> StrictGrammar | None:
    """Compile the grammars of calls of some tools; None if no tool is strict.

    The last ones are kept: hundreds of tools take a second, and agents send the same each time.
    """
    if not any(tool.strict for tool in tools):
        return None
    named = [
        Tool(
            tool.name, parameters=tool.parameters if tool.strict else ANY_OBJECT, strict=tool.strict
        )
        for tool in tools
    ]
    entries = [[tool.name, tool.parameters, tool.strict] for tool in named]
    key = json.dumps([call_form(model), entries])
    with _lock:
        kept = _kept.setdefault(model, OrderedDict())
        if key in kept:
            kept.move_to_end(key)
            return kept[key]
    try:
        grammar = _compiled(model, named)
    except InvalidArgument as error:
        grammar = StrictGrammar(named, warnings=(f"strict is not followed: {error}",))
    with _lock:
        kept[key] = grammar
        if len(kept) > _MAX_GRAMMARS:
            kept.popitem(last=False)
    return grammar


def _compiled(model: Model, tools: Sequence[Tool]) -> StrictGrammar:
    output_format, form = model.renderer.output_format, call_form(model)
    if output_format.channels:
        return _compiled_channels(model, tools)
    begins = [call.begin for call in output_format.calls]
    if not begins or (form != "hermes" and begins[0] is None):
        return StrictGrammar(tools, warnings=(f"strict is not followed in calls of {form}",))
    ids = marker_ids(model)
    markers = ids, model.end_token_ids

    def calls(tools: Sequence[Tool]) -> Grammar:
        rules = LarkRules(*markers)
        written = write_calls(form, AllowedCalls(rules, tools))
        return Grammar.from_lark(model, rules.text(f'" "? ({written})'))  # some tokenizers add it

    def bare_calls(tools: Sequence[Tool]) -> Grammar:
        rules = LarkRules(*markers)
        keys = ("arguments", "parameters") if output_format.bare_json else ("arguments",)
        written = write_bare_calls(AllowedCalls(rules, tools), keys)
        return Grammar.from_lark(model, rules.text(written))

    grammar = first_supported(model, tools, calls)
    if not any(form.is_json for form in output_format.bare_calls):
        return StrictGrammar(tools, grammar, marker_ids=ids, warnings=grammar.warnings)
    bare = first_supported(model, tools, bare_calls)
    warnings = tuple(dict.fromkeys((*grammar.warnings, *bare.warnings)))
    return StrictGrammar(tools, grammar, bare, marker_ids=ids, warnings=warnings)


def _compiled_channels(model: Model, tools: Sequence[Tool]) -> StrictGrammar:
    def content(tools: Sequence[Tool]) -> Grammar:
        rules = LarkRules(marker_ids(model), model.end_token_ids)
        text = rules.add(json_value(object_schema(tools[0])))
        return Grammar.from_lark(model, rules.text(rf"/[ \n]+/? {text}"))

    strict = [tool for tool in tools if tool.strict]
    arguments = {tool.name: first_supported(model, [tool], content) for tool in strict}
    warnings = [warning for grammar in arguments.values() for warning in grammar.warnings]
    return StrictGrammar(tools, arguments=arguments, warnings=tuple(dict.fromkeys(warnings)))
