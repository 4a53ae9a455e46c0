"""Answers with calls in tags: `<tool_call>` with JSON or with parameters, and similar tags.

Nearly every model follows a prompt that asks for JSON in `<tool_call>`, so nearly all formats have
this form beside their own.
"""

from dataclasses import replace
from functools import partial

from kvkeep.chat.call_beginnings import begin_json
from kvkeep.chat.call_form import CallForm, close_block
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.output_format import THINK, BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps
from kvkeep.chat.scanner import SPACE
from kvkeep.chat.tagged_calls import (
    FUNCTION,
    FUNCTION_TAGS,
    GLM_MARKERS,
    INVOKE_TAGS,
    LABEL,
    SEED_TAGS,
    FunctionTags,
    begin_function_tag,
    read_function_tag,
    read_glm_call,
)

TAG_END = "</tool_call>"
_SEED, _SEED_END = "<seed:tool_call>", "</seed:tool_call>"
_MINIMAX, _MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"


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


def _begin_tagged(reading: AnswerReading, end: str = TAG_END) -> Steps[None]:
    """Read JSON, Qwen3-Coder's tag or GLM's name. end: the marker behind the calls."""
    yield from reading.skip_space()
    if (yield from reading.take(FUNCTION)):
        yield from begin_function_tag(reading, block_end=end)
    elif (yield from reading.comes_next("[", "{")):
        yield from begin_json(reading)
    else:
        reading.require_tool((yield from reading.take_match(LABEL)).strip(SPACE))
        yield from reading.skip_space()
        yield from reading.expect(GLM_MARKERS[0], end)


def _read_bare_function_tag(reading: AnswerReading) -> Steps[None]:
    """Read `<function=name>` that no `<tool_call>` stands before."""
    calls_before = reading.call_count
    yield from read_function_tag(reading, TAG_END, in_block=False)
    yield from close_block(reading, calls_before, TAG_END)


def _begin_bare_function_tag(reading: AnswerReading) -> Steps[None]:
    """Read a name behind `<function=` that no `<tool_call>` stands before."""
    yield from begin_function_tag(reading)


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


def _begin_invokes(reading: AnswerReading, end: str) -> Steps[None]:
    """Read `<invoke name="...">`. end: the marker behind the calls."""
    yield from reading.skip_space()
    yield from reading.expect(INVOKE_TAGS.function)
    yield from begin_function_tag(reading, INVOKE_TAGS, end)


TAGGED = CallForm("<tool_call>", (TAG_END, *GLM_MARKERS), _read_tagged, _begin_tagged)
FUNCTION_TAG = CallForm(FUNCTION, (), _read_bare_function_tag, _begin_bare_function_tag)
FUNCTION_TAG_LINE = replace(FUNCTION_TAG, begins_line=True)
_SEED_CALLS = CallForm(
    _SEED,
    (_SEED_END,),
    partial(_read_tagged, end=_SEED_END, tags=SEED_TAGS),
    partial(_begin_tagged, end=_SEED_END),
)
_MINIMAX_CALLS = CallForm(
    _MINIMAX,
    (_MINIMAX_END,),
    partial(_read_invokes, end=_MINIMAX_END),
    partial(_begin_invokes, end=_MINIMAX_END),
)

QWEN3_CODER = OutputFormat(
    "qwen3-coder", signs=(("<function=", "<parameter="),), calls=(TAGGED, FUNCTION_TAG)
)
GLM = OutputFormat("glm", signs=(("<arg_key>",),), calls=(TAGGED,))
SEED_OSS = OutputFormat(
    "seed-oss",
    signs=((_SEED,),),
    reasoning=(BlockMarkers("<seed:think>", "</seed:think>"), THINK),
    calls=(_SEED_CALLS, TAGGED),
)
MINIMAX = OutputFormat("minimax", signs=((_MINIMAX,),), calls=(_MINIMAX_CALLS, TAGGED))
ERNIE = OutputFormat(
    "ernie",
    signs=(("<response>", "<tool_call>"),),
    calls=(TAGGED,),
    wrappers=(BlockMarkers("<response>", "</response>", has_lines=True),),
)
