"""Grammars of what follows the name of a strict tool in a call, up to the end of its arguments.

Each begins right behind the name, and also has any text that makes the name another one, or none.
White space has a limit, so that a model cannot write it without end.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

from kvkeep.chat.messages import Tool
from kvkeep.chat.tagged_calls import FUNCTION_TAGS, INVOKE_TAGS, SEED_TAGS, FunctionTags
from kvkeep.server.call_grammar import object_schema
from kvkeep.server.call_writers import (
    gemma_arguments,
    glm_arguments,
    python_arguments,
    tagged_function,
)
from kvkeep.server.lark_rules import LarkRules, either, indented_json, json_value, literal

_SPACE, _LINE_SPACE = r"/[ \t\r\n]{0,16}/", r"/[ \t\r]{0,16}/"
_SPACES, _LINE_SPACES = r" \t\r\n", r" \t\r"  # in a class of characters
_QUOTE = literal('"')
# A member between the name and the arguments, such as an id.
_MEMBER_KEY, _MEMBER_VALUE = r'/"(id|type|tool_call_id|call_id)"/', r'/"[^"\\\n]{0,64}"|[0-9]{1,9}/'
WriteCall = Callable[[LarkRules, Tool], str]
WriteJson = Callable[[Mapping[str, object]], str]


def _arguments(rules: LarkRules, tool: Tool, write_json: WriteJson = json_value) -> str:
    """Return the expression of JSON arguments."""
    return f"{_SPACE} {rules.add(write_json(object_schema(tool)))}"


def _json(rules: LarkRules, tool: Tool, write_json: WriteJson = json_value) -> str:
    """Return what follows `{"name": "NAME`."""
    key = either(map(literal, ('"arguments"', '"parameters"')))
    arguments = f'({key}) {_SPACE} ":" {_arguments(rules, tool, write_json)}'
    comma = f'{_SPACE} "," {_SPACE}'
    member = rules.add(f'{_MEMBER_KEY} {_SPACE} ":" {_SPACE} {_MEMBER_VALUE} {comma}')
    return f"{_QUOTE} {comma} {member}? {member}? {arguments} | {_other_than(_QUOTED)}"


def _keyed(rules: LarkRules, tool: Tool) -> str:
    """Return what follows `{"NAME`."""
    return f'{_QUOTE} {_SPACE} ":" {_arguments(rules, tool)} | {_other_than(_QUOTED)}'


def _function(rules: LarkRules, tool: Tool, tags: FunctionTags) -> str:
    """Return what follows `<function=NAME`."""
    function = f"{literal(tags.close)} {_SPACE} {tagged_function(rules, tool, tags)}"
    return f"{_LINE_SPACE} ({function} | {_other_than(tags.close, excluded=_LINE_SPACES)})"


def _bare_function(rules: LarkRules, tool: Tool, is_json: bool) -> str:
    """Return what follows `<function=NAME` outside of a block: arguments that have begun."""
    arguments = _arguments(rules, tool)
    if not is_json:
        tags = FUNCTION_TAGS
        other = _other_than(tags.parameter, tags.function_end, excluded="{" + _SPACES)
        arguments += f" | {_SPACE} ({tagged_function(rules, tool, tags)} | {other})"
    return f'{_LINE_SPACE} ">" ({arguments})'


def _glm(rules: LarkRules, tool: Tool) -> str:
    """Return what follows `<tool_call>NAME`."""
    return f"{_SPACE} ({glm_arguments(rules, tool)} | {_other_than('<', excluded=_SPACES)})"


def _gemma(rules: LarkRules, tool: Tool, quote: str) -> str:
    """Return what follows `call:NAME`."""
    arguments = gemma_arguments(rules, tool, quote)
    return f'{_SPACE} ("{{" {arguments} "}}" | {_other_than("{", excluded=_SPACES)})'


def _python(rules: LarkRules, tool: Tool) -> str:
    """Return what follows the name in `NAME(key=value)`, or in `NAME.call(key=value)`."""
    call = f'".call"? "(" {python_arguments(rules, tool)} ")"'
    return f"{call} | {_other_than('(', excluded='.')} | /[.]/ {_other_than('call(')}"


def _deepseek(rules: LarkRules, tool: Tool) -> str:
    """Return what follows `NAME` before a separator."""
    call = f"{rules.marker('<｜tool▁sep｜>')} {_arguments(rules, tool)}"
    return f"{_SPACE} ({call} | {_other_than('<', excluded=_SPACES)})"


def _fenced(rules: LarkRules, tool: Tool) -> str:
    """Return what follows `NAME` before fenced JSON, behind a separator."""
    call = f"{literal(_FENCE)} {_arguments(rules, tool)}"
    return f"{_SPACE} ({call} | {_other_than(_FENCE, excluded=_SPACES)})"


def _mistral(rules: LarkRules, tool: Tool) -> str:
    """Return what follows `[TOOL_CALLS]NAME`: perhaps an id and a separator, and arguments."""
    call_id, separator = map(rules.marker, ("[CALL_ID]", "[ARGS]"))
    arguments = rules.add(_arguments(rules, tool))
    call = f"(({call_id} /[a-zA-Z0-9]{{9}}/)? {separator})? {arguments}"
    begun = ("{", _QUOTED, "[CALL_ID]", "[ARGS]")  # arguments may also be in quotes, or null
    longer_name = _other_than(*begun, excluded=_SPACES)
    other = f"/[{_SPACES}]{{1,16}}/ {_other_than(*begun, 'null', excluded=_SPACES)}"
    return f"{call} | {longer_name} | {other}"


def _other_than(*texts: str, excluded: str = "") -> str:
    """Return any text that neither begins with one of some texts nor is the beginning of one.

    excluded: further characters that are not the first one, in a class of characters.
    """
    others = []
    for beginning in sorted({text[:length] for text in texts for length in range(len(text))}):
        following = {text[len(beginning)] for text in texts if text.startswith(beginning)}
        first_ones = excluded if beginning == "" else ""
        characters = "".join(map(re.escape, sorted(following)))
        others.append(f"{re.escape(beginning)}[^{characters}{first_ones}]")
    pattern = "|".join(others).replace("/", r"\/")
    return f"/({pattern})(?s:.*)/"


_QUOTED, _FENCE = '"', "```json"
ARGUMENTS = "arguments"  # alone, of a message
_JSON_ONLY: Mapping[str, WriteCall] = {"json": _json}
# By the name of a format: what follows a tool's name, by `kind` of `AnswerReading.name_begins`.
WRITERS: Mapping[str, Mapping[str, WriteCall]] = {
    **dict.fromkeys(("hermes", "ernie", "granite", "phi4-mini"), _JSON_ONLY),
    **dict.fromkeys(("nemotron2", "apriel"), _JSON_ONLY),
    "llama3": {"json": _json, "bare function": partial(_bare_function, is_json=True)},
    "command-r7b": {"json": partial(_json, write_json=indented_json)},
    "apertus": {"keyed": _keyed},
    "mistral": {"json": _json, "mistral": _mistral},
    "qwen3-coder": {
        "function": partial(_function, tags=FUNCTION_TAGS),
        "bare function": partial(_bare_function, is_json=False),
    },
    "seed-oss": {"seed": partial(_function, tags=SEED_TAGS)},
    "minimax": {"invoke": partial(_function, tags=INVOKE_TAGS)},
    "glm": {"glm": _glm},
    "gemma4": {"gemma": partial(_gemma, quote='<|"|>')},
    "function-gemma": {"gemma": partial(_gemma, quote="<escape>")},
    "deepseek": {"deepseek": _deepseek, "fenced": _fenced},
    "olmo3": {"python": _python},
    "lfm2": {"python": _python, "json": _json},
    "harmony": {ARGUMENTS: _arguments},
}
