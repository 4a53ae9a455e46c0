"""Grammars of calls of tools, in the format in which a model writes them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.chat.tagged_calls import FUNCTION_TAGS, INVOKE_TAGS, SEED_TAGS, FunctionTags
from kvkeep.server import argument_grammar as arguments
from kvkeep.server.call_grammar import AllowedCalls, call_schema, object_schema
from kvkeep.server.grammar import moved_schema
from kvkeep.server.lark_rules import (
    LarkRules,
    either,
    indented_json,
    json_value,
    literal,
    spaced_json,
)

_TAG, _TAG_END = "<tool_call>", "</tool_call>"


def _write_hermes(calls: AllowedCalls) -> str:
    rules = calls.rules
    value = json_value(call_schema(calls.tools))
    call = f'{rules.marker(_TAG)} "\\n"? {value} "\\n"? {rules.marker(_TAG_END)}'
    return rules.repeated(call, '"\\n"?')


def _function_writer(start: str, end: str, tags: FunctionTags) -> Callable[[AllowedCalls], str]:
    """Return a writer of calls in tags."""

    def write_calls(calls: AllowedCalls) -> str:
        rules = calls.rules

        def write(tool: Tool) -> str:
            name = literal(f"\n{tags.function}{tool.name}{tags.close}\n")
            function = tagged_function(rules, tool, tags)
            return rules.add(f'{rules.marker(start)} {name} {function} "\\n" {rules.marker(end)}')

        return calls.repeated(write, '"\\n"?')

    return write_calls


def tagged_function(rules: LarkRules, tool: Tool, tags: FunctionTags) -> str:
    """Return the expression of a call's parameters in tags, and of the function's end."""
    close = f"{tags.close}{tags.newline}"

    def begin(key: str) -> str:
        if key:
            return literal(f"{tags.parameter}{key}{close}")
        quote = '"' if '"' in tags.close else ""
        return rf"{literal(tags.parameter)} /[^<>{quote}\n]{{1,60}}/ {literal(close)}"

    value_end = f"{tags.newline}{tags.parameter_end}\n"
    values = arguments.tagged_arguments(rules, tool, begin, value_end, name=tags.label)
    return f"{values} {literal(tags.function_end)}"


def _write_glm(calls: AllowedCalls) -> str:
    rules = calls.rules

    def write(tool: Tool) -> str:
        name, values = literal(tool.name), glm_arguments(rules, tool)
        return rules.add(f'{rules.marker(_TAG)} {name} "\\n"? {values}')

    return calls.repeated(write, '"\\n"?')


def glm_arguments(rules: LarkRules, tool: Tool) -> str:
    """Return the expression of a call's arguments in GLM's form, and of the call's end."""
    key_start, key_end, value_start = map(rules.marker, ("<arg_key>", "</arg_key>", "<arg_value>"))

    def begin(key: str) -> str:
        text = literal(key) if key else r"/[^<>\n]{1,60}/"
        return f'{key_start} {text} {key_end} "\\n"? {value_start}'

    values = arguments.tagged_arguments(rules, tool, begin, "</arg_value>", '"\\n"?')
    return f"{values} {rules.marker(_TAG_END)}"


def _write_llama3(calls: AllowedCalls) -> str:
    """Bare JSON, which is known by its exact spaces, or JSON behind a marker."""
    rules, between = calls.rules, "/; ?/"
    forms: list[str] = []
    bare_tools = [tool for tool in calls.tools if tool.name in calls.bare_names]
    if bare_tools:
        forms.append(rules.repeated(spaced_json(call_schema(bare_tools, "parameters")), between))
    if rules.is_token("<|python_tag|>") or not bare_tools:
        value = json_value(call_schema(calls.tools, "parameters"))
        forms.append(f"{rules.marker('<|python_tag|>')} {rules.repeated(value, between)}")
    return either(forms)


def _write_mistral(calls: AllowedCalls) -> str:
    rules = calls.rules
    if not rules.is_token("[ARGS]"):
        return f'{rules.marker("[TOOL_CALLS]")} " "? {_json_list(calls)}'
    call_id = ""
    if rules.is_token("[CALL_ID]"):
        call_id = f"({rules.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
    head, separator = rules.marker("[TOOL_CALLS]"), rules.marker("[ARGS]")
    return calls.repeated(
        lambda tool: rules.add(
            f"{head} {literal(tool.name)} {call_id} {separator} {_arguments(tool)}"
        )
    )


def _write_harmony(calls: AllowedCalls) -> str:
    """One message to a tool, with the recipient in front of the channel or behind it."""
    rules = calls.rules
    channel, message = rules.marker("<|channel|>"), rules.marker("<|message|>")
    constraint = f'({rules.marker("<|constrain|>")}? "json")?'

    def write(tool: Tool) -> str:
        recipient = f"to=functions.{tool.name}"
        heads = (
            f"{channel} {literal(f'commentary {recipient} ')}",
            f'{literal(f" {recipient}")} {channel} "commentary" " "?',
        )
        body = f"{constraint} {message} {_arguments(tool)} {rules.marker('<|call|>')}"
        return rules.add(f"({either(heads)}) {body}")

    return calls.each(write)


def _write_gemma3(calls: AllowedCalls) -> str:
    rules, newline = calls.rules, '"\\n"?'
    value = json_value(call_schema(calls.tools, "parameters"))
    fenced = rules.repeated(f'"```json\\n" {value} "\\n```"', newline)
    if not (python_calls := _python_calls(_in_python(calls))):
        return fenced
    code = rules.repeated(f'"```tool_code\\n" {python_calls} "\\n```"', newline)
    return f"{fenced} | {code}"


def _write_olmo3(calls: AllowedCalls) -> str:
    start, end = map(calls.rules.marker, ("<function_calls>", "</function_calls>"))
    return f'{start} "\\n"? {_python_calls(calls)} "\\n"? {end}'


def _write_lfm2(calls: AllowedCalls) -> str:
    """A list of calls as in Python, or of JSON objects."""
    start, end = map(calls.rules.marker, ("<|tool_call_start|>", "<|tool_call_end|>"))
    values = _json_list(calls)
    if python_calls := _python_calls(_in_python(calls), between='", "'):
        values = f'("[" {python_calls} "]" | {values})'
    return f"{start} {values} {end}"


def _in_python(calls: AllowedCalls) -> AllowedCalls:
    """Return the calls that can be written as in Python."""
    syntax = arguments.python_syntax()
    return replace(calls, tools=[t for t in calls.tools if arguments.can_be_written(t, syntax)])


def _python_calls(calls: AllowedCalls, between: str = '"\\n"') -> str:
    """Return calls as in Python; nothing if there are no tools."""
    if not calls.tools:
        return ""
    rules, syntax = calls.rules, arguments.python_syntax()
    arguments.define_values(rules, syntax)

    def write(tool: Tool) -> str:
        values = arguments.named_arguments(rules, tool, syntax, "=")
        call = rules.add(f'{literal(tool.name)} "(" {values} ")"')
        return f'{call} | "print(" {call} ")"'

    return calls.repeated(write, between)


def python_arguments(rules: LarkRules, tool: Tool) -> str:
    """Return the expression of the arguments of the only call of a grammar, as in Python."""
    syntax = arguments.python_syntax()
    arguments.define_values(rules, syntax)
    return arguments.named_arguments(rules, tool, syntax, "=")


def gemma_arguments(rules: LarkRules, tool: Tool, quote: str) -> str:
    """Return the expression of the arguments of the only call of a grammar, in Gemma's form."""
    syntax = arguments.quoted_syntax(rules, quote)
    arguments.define_values(rules, syntax)
    return arguments.named_arguments(rules, tool, syntax, ":")


def _gemma_writer(opener: str, end: str, quote: str) -> Callable[[AllowedCalls], str]:
    def write_calls(calls: AllowedCalls) -> str:
        rules = calls.rules
        syntax = arguments.quoted_syntax(rules, quote)
        arguments.define_values(rules, syntax)

        def write(tool: Tool) -> str:
            values = arguments.named_arguments(rules, tool, syntax, ":")
            name = literal(f"call:{tool.name}")
            return rules.add(
                f'{rules.marker(opener)} {name} "{{" {values} "}}" {rules.marker(end)}'
            )

        return calls.repeated(write)

    return write_calls


def _write_deepseek(calls: AllowedCalls) -> str:
    """Calls of DeepSeek V3.1 and later, or those of before, with fenced JSON."""
    rules = calls.rules
    start, end, separator = (
        rules.marker(f"<｜tool▁{name}｜>") for name in ("call▁begin", "call▁end", "sep")
    )

    def write(tool: Tool) -> str:
        name, value = literal(tool.name), rules.add(_arguments(tool))
        opening = literal(f"{tool.name}\n```json\n")
        fenced = f'"function" {separator} {opening} {value} "\\n```"'
        return rules.add(f"{start} ({name} {separator} {value} | {fenced}) {end}")

    block_start, block_end = (rules.marker(f"<｜tool▁calls▁{name}｜>") for name in ("begin", "end"))
    newline = '"\\n"?'
    return f"{block_start} {newline} {calls.repeated(write, newline)} {newline} {block_end}"


def _write_command_r7b(calls: AllowedCalls) -> str:
    start, end = map(calls.rules.marker, ("<|START_ACTION|>", "<|END_ACTION|>"))
    first = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}}
    value = _indented_list(call_schema(calls.tools, "parameters", "tool_name", first))
    return f"{start} {value} {end}"


def _write_command_r(calls: AllowedCalls) -> str:
    value = _indented_list(call_schema(calls.tools, "parameters", "tool_name"))
    return f'"Action:" (" " | "\\n")? "```json\\n" {value} "\\n"? "```"'


def _indented_list(schema: Mapping[str, Any]) -> str:
    items = moved_schema(schema, "#/items")
    return indented_json({"type": "array", "items": items, "minItems": 1})


def _write_granite(calls: AllowedCalls) -> str:
    """A list behind a marker, or Hermes' form, which Granite 4 writes."""
    listed = f'{calls.rules.marker("<|tool_call|>")} " "? {_json_list(calls)}'
    return f"{listed} | {_write_hermes(calls)}"


def _list_writer(start: str, end: str) -> Callable[[AllowedCalls], str]:
    """Return a writer of a list of calls between two markers."""

    def write_calls(calls: AllowedCalls) -> str:
        return f"{calls.rules.marker(start)} {_json_list(calls)} {calls.rules.marker(end)}"

    return write_calls


def _write_apertus(calls: AllowedCalls) -> str:
    """A list of objects whose only key is the name of the tool."""
    start, end = map(calls.rules.marker, ("<|tools_prefix|>", "<|tools_suffix|>"))

    def write(tool: Tool) -> str:
        return f'{literal(f"{{{json.dumps(tool.name)}: ")} {_arguments(tool)} "}}"'

    return f'{start} "[" {calls.repeated(write, "/, ?/")} "]" {end}'


def _write_functionary(calls: AllowedCalls) -> str:
    """Names with JSON below them; the prompt ends with `>>>`, which is between calls too."""

    def write(tool: Tool) -> str:
        name = literal(f"{tool.name}\n")
        return f"{name} {_arguments(tool)}"

    return calls.repeated(write, '">>>"')


def _json_list(calls: AllowedCalls) -> str:
    call_id = {"id": {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}}
    item = calls.rules.add(json_value(call_schema(calls.tools, last=call_id)))
    return f'"[" {item} (/, ?/ {item})* "]"'


def _arguments(tool: Tool) -> str:
    return json_value(object_schema(tool))


_WRITERS: Mapping[str, Callable[[AllowedCalls], str]] = {
    "hermes": _write_hermes,
    "qwen3-coder": _function_writer(_TAG, _TAG_END, FUNCTION_TAGS),
    "seed-oss": _function_writer("<seed:tool_call>", "</seed:tool_call>", SEED_TAGS),
    "minimax": _function_writer("<minimax:tool_call>", "</minimax:tool_call>", INVOKE_TAGS),
    "glm": _write_glm,
    "llama3": _write_llama3,
    "mistral": _write_mistral,
    "harmony": _write_harmony,
    "gemma3": _write_gemma3,
    "gemma4": _gemma_writer("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": _gemma_writer("<start_function_call>", "<end_function_call>", "<escape>"),
    "deepseek": _write_deepseek,
    "command-r7b": _write_command_r7b,
    "command-r": _write_command_r,
    "granite": _write_granite,
    "phi4-mini": _list_writer("<|tool_call|>", "<|/tool_call|>"),
    "olmo3": _write_olmo3,
    "lfm2": _write_lfm2,
    "nemotron2": _list_writer("<TOOLCALL>", "</TOOLCALL>"),
    "apriel": _list_writer("<tool_calls>", "</tool_calls>"),
    "apertus": _write_apertus,
    "functionary": _write_functionary,
    "ernie": _write_hermes,
}
WRITABLE = frozenset(_WRITERS)  # names of formats


def write_calls(format_name: str, calls: AllowedCalls) -> str:
    """Return the expression of at least one call in a format. Raises KeyError: see `WRITABLE`."""
    return _WRITERS[format_name](calls)
