"""Grammars of calls that a model makes of its own accord, for tools that are strict."""

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from weakref import WeakKeyDictionary

from kvkeep.chat.messages import Tool
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.argument_grammar import can_be_written, python_syntax
from kvkeep.server.grammar import ANY_OBJECT, Grammar
from kvkeep.server.lark_rules import LarkRules
from kvkeep.server.strict_writers import ARGUMENTS, WRITERS, WriteCall
from kvkeep.server.tool_grammars import call_form, first_supported, marker_ids

_MAX_GRAMMARS = 8  # that are kept for a model
_MAX_SECONDS = 20.0  # for those of all tools
_TOO_LONG = "compiling those of all tools takes too long"


@dataclass(frozen=True)
class StrictGrammar:
    """Grammars of calls of some tools, of which some are strict.

    behind_names: for each `kind` of `AnswerReading.name_begins` and each strict tool, of what
    follows its name, up to the end of the arguments. arguments: for each, of JSON arguments alone.
    """

    tools: Sequence[Tool]
    behind_names: Mapping[str, Mapping[str, Grammar]] = field(default_factory=dict)
    arguments: Mapping[str, Grammar] = field(default_factory=dict)
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
    form = call_form(model)
    writers = WRITERS.get(form)
    if writers is None:
        return StrictGrammar(tools, warnings=(f"strict is not followed in calls of {form}",))
    ids, warnings = marker_ids(model), dict[str, None]()  # each once, in order
    deadline = time.monotonic() + _MAX_SECONDS
    grammars: dict[str, dict[str, Grammar]] = {kind: {} for kind in writers}
    for tool in filter(lambda tool: tool.strict, tools):
        if time.monotonic() > deadline:
            tool = replace(tool, parameters=ANY_OBJECT)
            warnings[f"the parameters of {tool.name} are not followed: {_TOO_LONG}"] = None
        for kind, write in writers.items():
            if kind == "python" and "json" in writers and not can_be_written(tool, python_syntax()):
                continue  # the form has both

            def compiled(tools: Sequence[Tool], write: WriteCall = write) -> Grammar:
                rules = LarkRules(ids, model.end_token_ids)
                return Grammar.from_lark(model, rules.text(write(rules, tools[0])))

            grammar = grammars[kind][tool.name] = first_supported(model, [tool], compiled)
            warnings |= dict.fromkeys(grammar.warnings)
    arguments = grammars.pop(ARGUMENTS, None)
    if arguments is None:
        arguments = {name: _of_arguments(g) for name, g in grammars.get("json", {}).items()}
    return StrictGrammar(tools, grammars, arguments, tuple(warnings))


def _of_arguments(grammar: Grammar) -> Grammar:
    """Return the grammar of JSON arguments, given that of what follows a name in JSON."""
    grammar = grammar.copy()
    grammar.follow_text('", "arguments":')
    return grammar
