"""Calls without a marker of their own, which are known by how they begin.

JSON of a call, in a block of code or not; a list of calls as in Python; a name and JSON below it.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvkeep.chat.call_beginnings import begin_json_call, begin_python
from kvkeep.chat.call_form import FENCE, BareForm, close_block, read_arguments
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.messages import NAMESPACE_SEPARATOR
from kvkeep.chat.python_calls import read_python_calls
from kvkeep.chat.reading import AnswerReading, NotACall, Steps

_FENCES = (f"{FENCE}json", FENCE)
_MODULES = ("", "functions.", "tools.", "default_api.")
_TOOLS, _TOOLS_END = "<tools>", "</tools>"


def _read_json(reading: AnswerReading) -> Steps[None]:
    yield from read_json_calls(reading, needs_arguments=True)
    yield from reading.written_text()


def _begin_enclosed(reading: AnswerReading, *starts: str) -> Steps[None]:
    yield from reading.expect(*starts)
    yield from reading.skip_space()
    yield from begin_json_call(reading)


def _read_enclosed(reading: AnswerReading, starts: Sequence[str], end: str) -> Steps[None]:
    calls_before = reading.call_count
    yield from reading.expect(*starts)
    yield from read_json_calls(reading, (end,), needs_arguments=True)
    yield from close_block(reading, calls_before, end)


def _enclosed(end: str, *starts: str) -> BareForm:
    """Return the form of calls as JSON between two markers. starts: a longer one comes first."""
    return BareForm(
        lambda reading: _begin_enclosed(reading, *starts),
        lambda reading: _read_enclosed(reading, starts, end),
    )


def _begin_python_list(reading: AnswerReading) -> Steps[None]:
    yield from reading.expect("[")
    yield from begin_python(reading)


def _read_python_list(reading: AnswerReading) -> Steps[None]:
    yield from read_python_calls(reading)
    yield from reading.written_text()


def _written_names(names: Iterable[str]) -> Iterator[str]:
    """Yield the names that `tool_name` may take for tools, so that no other text is held back."""
    for name in names:
        parts = name.split(NAMESPACE_SEPARATOR)
        for start in range(len(parts)):
            for separator in (NAMESPACE_SEPARATOR, "."):
                for module in _MODULES:
                    yield module + separator.join(parts[start:])


def _begin_named(reading: AnswerReading) -> Steps[str]:
    """Read the name of a tool and its line, if JSON follows, which is not read. Return the name."""
    line = yield from reading.expect(*(f"{name}\n" for name in _written_names(reading.tools)))
    name = reading.require_tool(line.removesuffix("\n")).name
    if (yield from reading.skip_space()) != "{":
        raise NotACall
    if (yield from reading.char_behind("{")) not in ('"', "}", ""):
        raise NotACall
    return name


def _begin_named_call(reading: AnswerReading) -> Steps[None]:
    yield from _begin_named(reading)


def _read_named_call(reading: AnswerReading) -> Steps[None]:
    """Read the name of a tool and, on the next line, the JSON of its arguments."""
    yield from read_arguments(reading, (yield from _begin_named(reading)))


JSON_CALLS = BareForm(begin_json_call, _read_json)
JSON_LINES = BareForm(begin_json_call, _read_json, in_text=True)
FENCED_CALLS = _enclosed(FENCE, *_FENCES)
CALLS_IN_TOOLS = _enclosed(_TOOLS_END, _TOOLS)
PYTHON_LIST = BareForm(_begin_python_list, _read_python_list, is_json=False)
NAMED_CALL = BareForm(_begin_named_call, _read_named_call, is_json=False)
