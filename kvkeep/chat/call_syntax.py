"""The forms in which models write calls of tools, by the marker that begins them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvkeep.chat import call_beginnings as beginnings
from kvkeep.chat.call_beginnings import TAG_END, Begin
from kvkeep.chat.gemma_calls import read_gemma_call
from kvkeep.chat.json_calls import object_text, read_json_calls, read_json_value, stream_object
from kvkeep.chat.messages import ToolCall
from kvkeep.chat.python_calls import (
    is_python_call,
    read_python_calls,
    write_python_calls,
    write_python_lines,
)
from kvkeep.chat.reading import AnswerReading, NotACall, Steps
from kvkeep.chat.scanner import SPACE
from kvkeep.chat.tagged_calls import (
    FUNCTION,
    FUNCTION_TAGS,
    GLM_MARKERS,
    INVOKE_TAGS,
    SEED_TAGS,
    FunctionTags,
    read_function_tag,
    read_glm_call,
)

_NAME = re.compile(r"[\w.:-]{1,256}")
_ID = re.compile(r"\w{1,64}")
_TAG = "<tool_call>"
FENCE = "```"


@dataclass(frozen=True)
class CallForm:
    """A form of calls.

    opener: the marker that begins a block of calls. markers: the others. read: reads a block behind
    its opener; what it has read when it raises NotACall is text. begins_line: whether the opener
    must begin a line, and in no block of code. begin: reads the beginning of a call behind an
    opener in reasoning; None if the opener is no tag.
    """

    opener: str
    markers: tuple[str, ...]
    read: Callable[[AnswerReading], Steps[None]]
    begin: Begin | None = None
    begins_line: bool = False


@dataclass(frozen=True)
class CallText:
    """A form in which calls are written into the text of a message, between two markers.

    result_role: the role of the messages of their results.
    """

    start: str
    end: str
    write: Callable[[Sequence[ToolCall]], str]
    result_role: str = "tool"


def close_block(reading: AnswerReading, calls_before: int, *ends: str) -> Steps[None]:
    """Read the end of a block, if it comes. All is text if the block had no calls."""
    scanner = reading.scanner
    if reading.call_count == calls_before:
        raise NotACall
    if scanner.written.strip(SPACE + "]},;"):
        yield from reading.written_text()
    while (char := (yield from reading.skip_space())) and char in "]}":
        scanner.advance(1)
    if not (yield from reading.take(*ends)):
        yield from reading.written_text()


def _read_tagged(
    reading: AnswerReading, end: str = TAG_END, tags: FunctionTags = FUNCTION_TAGS
) -> Steps[None]:
    """Read `<tool_call>` with JSON, with Qwen3-Coder's tags, or with GLM's."""
    calls_before = reading.call_count
    char = yield from reading.skip_space()
    if char in ("{", "["):
        yield from read_json_calls(reading, (end,))
    elif char == "<":
        yield from reading.expect(tags.function)
        yield from read_function_tag(reading, end, tags)
    else:
        yield from read_glm_call(reading, end)
    yield from close_block(reading, calls_before, end)


def _read_bare_function_tag(reading: AnswerReading) -> Steps[None]:
    """Read `<function=name>` that no `<tool_call>` stands before."""
    calls_before = reading.call_count
    yield from read_function_tag(reading, TAG_END, in_block=False)
    yield from close_block(reading, calls_before, TAG_END)


def _read_invokes(reading: AnswerReading, end: str) -> Steps[None]:
    """Read `<invoke name="...">` with MiniMax's parameters, once or several times."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.expect(INVOKE_TAGS.function)
    while True:
        yield from read_function_tag(reading, end, INVOKE_TAGS)
        yield from reading.skip_space()
        if not (yield from reading.take(INVOKE_TAGS.function)):
            break
    yield from close_block(reading, calls_before, end)


def _read_keyed(reading: AnswerReading, end: str) -> Steps[None]:
    """Read a list of objects whose only key is the name of a tool: `[{"name": {...}}]`."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.take("[")
    while (yield from reading.skip_space()) == "{":
        yield from reading.expect("{")
        if (yield from reading.skip_space()) != '"':
            raise NotACall
        name = json.loads((yield from read_json_value(reading)))
        yield from reading.skip_space()
        yield from reading.expect(":")
        reading.require_tool(name)
        yield from read_arguments(reading, name, ends=(end,))
        yield from reading.skip_space()
        yield from reading.take("}")
        reading.scanner.mark()
        yield from reading.skip_space()
        yield from reading.take(",")
    yield from close_block(reading, calls_before, end)


def _read_json(reading: AnswerReading, *ends: str) -> Steps[None]:
    """Read JSON up to one of the markers, which may be missing."""
    calls_before = reading.call_count
    yield from read_json_calls(reading, ends)
    yield from close_block(reading, calls_before, *ends)


def _read_mistral(reading: AnswerReading) -> Steps[None]:
    """Read `[TOOL_CALLS]` with a list of JSON objects, or `name[CALL_ID]id[ARGS]{...}`."""
    calls_before = reading.call_count
    if (yield from reading.skip_space()) in ("{", "["):
        yield from read_json_calls(reading)
        yield from close_block(reading, calls_before)
        return
    name = yield from reading.take_match(_NAME)
    call_id = ""
    marker = yield from reading.take("[CALL_ID]", "[ARGS]")
    if marker == "[CALL_ID]":
        call_id = yield from reading.take_match(_ID)
        yield from reading.expect("[ARGS]")
    reading.require_tool(name)
    yield from read_arguments(reading, name, call_id)


def read_arguments(
    reading: AnswerReading, name: str, call_id: str = "", ends: tuple[str, ...] = ()
) -> Steps[None]:
    """Read the JSON arguments of a known tool, or null."""
    char = yield from reading.skip_space()
    if char == "{":
        yield reading.start_call(name, call_id)
        yield from stream_object(reading, ends)
    elif not char:
        yield reading.start_call(name, call_id)
        yield reading.end_call(complete=False)
    else:
        arguments = object_text((yield from read_json_value(reading)))
        yield from reading.whole_call(name, arguments, call_id)


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def _read_deepseek(reading: AnswerReading, in_call: bool = False) -> Steps[None]:
    """Read DeepSeek's calls, up to the end of their block. in_call: whether a call has begun."""
    calls_before = reading.call_count
    begin, end = _DEEPSEEK_CALL
    if not in_call:
        yield from reading.skip_space()
        yield from reading.expect(begin)
    while True:
        yield from _read_deepseek_call(reading)
        yield from reading.skip_space()
        yield from reading.take(end)
        reading.scanner.mark()
        yield from reading.skip_space()
        if not (yield from reading.take(begin)):
            break
    yield from close_block(reading, calls_before, _DEEPSEEK[1])


def _read_deepseek_call(reading: AnswerReading) -> Steps[None]:
    """Read `name<｜tool▁sep｜>{...}`, or `function<｜tool▁sep｜>name`, a line and fenced JSON."""
    yield from reading.skip_space()
    name = yield from reading.take_match(_NAME)
    yield from reading.skip_space()
    yield from reading.expect(_DEEPSEEK_SEPARATOR)
    is_fenced = (yield from reading.skip_space()) not in ("{", "")
    if is_fenced:
        name = yield from reading.take_match(_NAME)
        yield from reading.skip_space()
        yield from reading.expect("```json")
    reading.require_tool(name)
    yield from read_arguments(reading, name, ends=(_DEEPSEEK_CALL[1],))
    if is_fenced:
        yield from reading.skip_space()
        yield from reading.take(FENCE)


def _read_python(reading: AnswerReading, *ends: str) -> Steps[None]:
    """Read calls written as in Python."""
    calls_before = reading.call_count
    yield from read_python_calls(reading)
    yield from close_block(reading, calls_before, *ends)


def _read_python_tag(reading: AnswerReading, end: str) -> Steps[None]:
    """Read JSON, or calls of Llama's own tools as in Python: `name.call(key="text")`."""
    calls_before = reading.call_count
    if (yield from reading.skip_space()) in ("{", ""):
        yield from read_json_calls(reading, (end,))
        yield from close_block(reading, calls_before, end)
        return
    yield from _read_lfm2(reading, end)


def _read_lfm2(reading: AnswerReading, end: str) -> Steps[None]:
    """Read a list of calls as in Python or, if the system text requests it, of JSON objects."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.take("[")
    if (yield from reading.skip_space()) == "{":
        yield from read_json_calls(reading, (end,))
    else:
        yield from read_python_calls(reading)
    yield from close_block(reading, calls_before, end)


def _write_lfm2(calls: Sequence[ToolCall]) -> str:
    """Return calls as `_read_lfm2` reads them."""
    if all(map(is_python_call, calls)):
        return write_python_calls(calls)
    return _write_json(calls)


def _write_json(calls: Sequence[ToolCall]) -> str:
    """Return calls as a list of JSON objects."""
    objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return json.dumps(objects, ensure_ascii=False)


def _read_gemma(reading: AnswerReading, quote: str, end: str) -> Steps[None]:
    calls_before = reading.call_count
    yield from read_gemma_call(reading, quote)
    yield from close_block(reading, calls_before, end)


def _read_action(reading: AnswerReading) -> Steps[None]:
    """Read the fenced JSON behind `Action:`."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.expect("```json")
    yield from read_json_calls(reading, (FENCE,))
    yield from close_block(reading, calls_before, FENCE)


def _read_fenced_json(reading: AnswerReading) -> Steps[None]:
    """Read JSON in a code block, which must have arguments to be a call."""
    calls_before = reading.call_count
    yield from read_json_calls(reading, (FENCE,), needs_arguments=True)
    yield from close_block(reading, calls_before, FENCE)


def _json_form(opener: str, *ends: str, begin: Begin | None = beginnings.begin_json) -> CallForm:
    return CallForm(opener, ends, lambda reading: _read_json(reading, *ends), begin)


def _python_form(
    opener: str, *ends: str, begin: Begin | None = beginnings.begin_python
) -> CallForm:
    return CallForm(opener, ends, lambda reading: _read_python(reading, *ends), begin)


def _gemma_form(opener: str, end: str, quote: str) -> CallForm:
    read = partial(_read_gemma, quote=quote, end=end)
    return CallForm(opener, (end, quote), read, beginnings.begin_gemma)


TAGGED = CallForm(_TAG, (TAG_END, *GLM_MARKERS), _read_tagged, beginnings.begin_tagged)
_SEED = "<seed:tool_call>", "</seed:tool_call>"
SEED = CallForm(
    *(_SEED[0], _SEED[1:], partial(_read_tagged, end=_SEED[1], tags=SEED_TAGS)),
    begin=partial(beginnings.begin_tagged, end=_SEED[1]),
)
_MINIMAX = "<minimax:tool_call>", "</minimax:tool_call>"
MINIMAX = CallForm(
    *(_MINIMAX[0], _MINIMAX[1:], partial(_read_invokes, end=_MINIMAX[1])),
    begin=partial(beginnings.begin_invoke, end=_MINIMAX[1]),
)
_APERTUS = "<|tools_prefix|>", "<|tools_suffix|>"
APERTUS = CallForm(
    *(_APERTUS[0], _APERTUS[1:], partial(_read_keyed, end=_APERTUS[1])),
    begin=beginnings.begin_keyed,
)
FUNCTION_TAG = CallForm(FUNCTION, (), _read_bare_function_tag, beginnings.begin_function)
FUNCTION_TAG_LINE = replace(FUNCTION_TAG, begins_line=True)
_PYTHON_TAG_END = "<|eom_id|>"
PYTHON_TAG = CallForm(
    *("<|python_tag|>", (_PYTHON_TAG_END,), partial(_read_python_tag, end=_PYTHON_TAG_END)),
    begin=beginnings.begin_json_or_python,
)
MISTRAL = CallForm("[TOOL_CALLS]", ("[CALL_ID]", "[ARGS]"), _read_mistral, beginnings.begin_mistral)
GRANITE = _json_form("<|tool_call|>", "<|/tool_call|>", TAG_END)
GRANITE_TEXT = CallText("<|tool_call|>", "", _write_json, "tool_response")
PHI4_MINI_TEXT = CallText("<|tool_call|>", "<|/tool_call|>", _write_json, "tool_response")
COMMAND = _json_form("<|START_ACTION|>", "<|END_ACTION|>", begin=beginnings.begin_command)
ACTION = CallForm("Action:", (), _read_action)
_begin_deepseek = partial(beginnings.begin_deepseek, separator=_DEEPSEEK_SEPARATOR)
DEEPSEEK = CallForm(
    *(_DEEPSEEK[0], (_DEEPSEEK[1], *_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR), _read_deepseek),
    begin=partial(_begin_deepseek, opener=_DEEPSEEK_CALL[0]),
)
DEEPSEEK_CALL = CallForm(
    _DEEPSEEK_CALL[0], (), partial(_read_deepseek, in_call=True), _begin_deepseek
)
_OLMO = "<function_calls>", "</function_calls>"
OLMO = _python_form(*_OLMO)
OLMO_TEXT = CallText(*_OLMO, write_python_lines, "environment")
TOOL_CODE = _python_form("```tool_code", FENCE, begin=None)
_LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2 = CallForm(
    *(_LFM2[0], _LFM2[1:], partial(_read_lfm2, end=_LFM2[1])),
    begin=beginnings.begin_json_or_python,
)
LFM2_TEXT = CallText(*_LFM2, _write_lfm2)
APRIEL = _json_form("<tool_calls>", "</tool_calls>")
NEMOTRON2 = _json_form("<TOOLCALL>", "</TOOLCALL>")
FENCED_JSON = CallForm("```json", (), _read_fenced_json)
GEMMA = _gemma_form("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma_form("<start_function_call>", "<end_function_call>", "<escape>")
