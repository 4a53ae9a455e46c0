"""Answers of Llama 3: bare JSON, or calls behind `<|python_tag|>`."""

from functools import partial

from kvkeep.chat.bare_calls import JSON_LINES, PYTHON_LIST
from kvkeep.chat.call_beginnings import begin_json_or_python
from kvkeep.chat.call_form import CallForm, close_block
from kvkeep.chat.formats.python_blocks import read_json_or_python
from kvkeep.chat.formats.tagged import FUNCTION_TAG_LINE, TAGGED
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps

_TAG, _END = "<|python_tag|>", "<|eom_id|>"


def _read_python_tag(reading: AnswerReading, end: str) -> Steps[None]:
    """Read JSON, or calls of Llama's own tools as in Python: `name.call(key="text")`."""
    calls_before = reading.call_count
    if (yield from reading.skip_space()) in ("{", ""):
        yield from read_json_calls(reading, (end,))
        yield from close_block(reading, calls_before, end)
        return
    yield from read_json_or_python(reading, end)


_PYTHON_TAG = CallForm(_TAG, (_END,), partial(_read_python_tag, end=_END), begin_json_or_python)

LLAMA3 = OutputFormat(
    "llama3",
    signs=((_TAG,), ("<|start_header_id|>", '"parameters"')),
    calls=(_PYTHON_TAG, TAGGED, FUNCTION_TAG_LINE),
    bare_json=True,
    bare_calls=(JSON_LINES, PYTHON_LIST),
)
