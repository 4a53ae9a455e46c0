"""Answers are read as they were written, in any division into pieces."""

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from chat.written_answers import FORMS, format_of, written_answers
from chat.written_answers import TOOLS as WRITTEN_TOOLS
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvkeep.chat.formats.registry import FORMATS, format_by_name
from kvkeep.chat.messages import Tool, ToolCall
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    Output,
    TextDelta,
    joined_output,
)
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.python_calls import is_python_call
from tests.chat.chats import ARGUMENTS, JSON_VALUES
from tests.examples import examples

TOOLS = [Tool("weather"), Tool("shell")]


def read(text: str, name: str = "hermes", size: int = 10**9, **settings: bool) -> Output:
    """Read a text in pieces of a size."""
    numbers = itertools.count()
    reader = OutputReader(format_by_name(name), TOOLS, lambda: f"call_{next(numbers)}", **settings)
    events = []
    for start in range(0, len(text), size):
        events += reader.push([text[start : start + size]])
    events += reader.finish()
    assert joined_output(events) == reader.output
    return reader.output


def described(output: Output) -> list[str | tuple[str, str, bool]]:
    """Describe the text and the calls of an answer."""
    return [
        (part.name, part.arguments, part.complete) if hasattr(part, "arguments") else part.text
        for part in output.parts
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'Hi <tool_call>\n{"name": "weather", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
            "\n\nSee.\n",
            ["Hi", ("weather", '{"a": "</tool_call>"}', True), "\n\nSee.\n"],
        ),
        ("<think>\nHm.\n</think>\n\nA <think> tag", ["Hm.", "A <think> tag"]),
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "shell", "arguments": null}</tool_call>\n',
            [
                '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
                ("shell", "{}", True),
            ],
        ),
        (
            '<tool_call>{"arguments": {"a": 1}, "name": "shell"}</tool_call>',
            [("shell", '{"a": 1}', True)],
        ),
        (
            '<tool_call>{"name": "shell", "arguments": [1]}</tool_call> x',
            ['<tool_call>{"name": "shell", "arguments": [1]}</tool_call> x'],
        ),
        (
            '<tool_call>{"name": "shell", "arguments": {"a": 1',
            [("shell", '{"a": 1', False)],
        ),
        (
            '{"name": "weather", "arguments": {"city": "Rome"}}',
            [("weather", '{"city": "Rome"}', True)],
        ),
        (
            'Hi {"name": "weather", "arguments": {"city": "Rome"}}',
            ['Hi {"name": "weather", "arguments": {"city": "Rome"}}'],
        ),
        ("a <tool_ca", ["a <tool_ca"]),
        (
            '<tool_call>{"name": "shell"}</tool_call>\n<tool_call>{"name": "shell", "arg',
            [("shell", "{}", True), '<tool_call>{"name": "shell", "arg'],
        ),
    ],
)
def test_hermes_calls_are_read(text: str, expected: list[object], size: int) -> None:
    assert described(read(text, size=size)) == expected


WRITTEN_NAMES = {
    "tools.weather": "weather",
    "functions.weather": "weather",
    "crm.find": "crm__find",
    "functions.crm__find": "crm__find",
    "functions.find": "crm__find",
    "find": "crm__find",
    "fs.read": "mcp__fs__read",
    "web.read": "mcp__web__read",
}


@pytest.mark.parametrize("size", [1, 2, 3, 10**9])
@pytest.mark.parametrize(
    ("value", "expected"),
    [('"""a\nb"""', "a\nb"), ("'''it's'''", "it's"), ('""', ""), ("''", ""), ('"""a"b"""', 'a"b')],
)
def test_strings_of_python_calls_are_read_the_same_in_any_division(
    value: str, expected: str, size: int
) -> None:
    text = f"<function_calls>weather(a={value} )</function_calls>"
    ((name, arguments, complete),) = described(read(text, "olmo3", size))
    assert (name, json.loads(arguments), complete) == ("weather", {"a": expected}, True)


@given(
    several=st.lists(
        ARGUMENTS | st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), JSON_VALUES),
        min_size=1,
        max_size=3,
    ),
    size=st.integers(1, 20),
    name=st.sampled_from([name for name, form in FORMATS.items() if form.call_text]),
)
def test_calls_written_as_text_are_read_as_the_same(
    several: list[dict[str, Any]], size: int, name: str
) -> None:
    calls = [ToolCall(f"call_{n}", "weather", arguments) for n, arguments in enumerate(several)]
    assume(name != "olmo3" or all(map(is_python_call, calls)))  # which writes nothing else
    form = FORMATS[name].call_text
    output = read(f"{form.start}{form.write(calls)}{form.end}Done.", name, size)
    assert [call.message_part() for call in output.calls] == calls
    assert output.text == "Done."


@pytest.mark.parametrize("number", ["1e400", "-1.5e309", "[2, 1E999]"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", '<tool_call>{{"name": "weather", "arguments": {{"a": {}}}}}</tool_call>'),
        ("olmo3", "<function_calls>weather(a={})</function_calls>"),
        ("gemma4", "<|tool_call>call:weather{{a:{}}}<tool_call|>"),
    ],
)
def test_numbers_beyond_the_largest_float_do_not_become_infinity(
    name: str, form: str, number: str
) -> None:
    """JSON has no infinity: what is read as a call can be written as JSON."""
    output = read(form.format(number), name)
    for call in output.calls:
        json.dumps(call.message_part().arguments, allow_nan=False)


@pytest.mark.parametrize("form", FORMS)
def test_names_that_models_write_are_those_of_the_tools(form: str) -> None:
    """With or without a module, and with or without the namespace."""
    tools = [Tool(name) for name in ("weather", "crm__find", "mcp__fs__read", "mcp__web__read")]
    output_format = format_of(FORMS[form], control_tokens=False)
    for written, name in WRITTEN_NAMES.items():
        text = FORMS[form].write_calls([(written, {"a": 1})]).replace("\x00", "")
        reader = OutputReader(output_format, tools)
        output = joined_output([*reader.push([text]), *reader.finish()])
        assert [call.name for call in output.calls] == [name], written


@pytest.mark.parametrize("written", ["read", "e.read", "functions.", "__find", "weather.find"])
def test_names_that_no_tool_or_several_have_are_text(written: str) -> None:
    tools = [Tool(name) for name in ("weather", "crm__find", "mcp__fs__read", "mcp__web__read")]
    text = FORMS["hermes"].write_calls([(written, {})]).replace("\x00", "")
    reader = OutputReader(format_by_name("hermes"), tools)
    output = joined_output([*reader.push([text]), *reader.finish()])
    assert (output.calls, output.text) == ([], text)


@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_a_forced_call_that_is_cut_off_is_an_incomplete_call(size: int) -> None:
    text = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert described(read(text, size=size, forced=True)) == [("weather", '{"city": "Rome"}', True)]
    for length in range(len('{"name": "w'), len(text) - 1):
        ((name, arguments, complete),) = described(read(text[:length], size=size, forced=True))
        assert name == "weather"
        assert '{"city": "Rome"}'.startswith(arguments)
        assert complete == (arguments == '{"city": "Rome"}')


@given(text=st.text(st.sampled_from("ab <tool_call>{/"), max_size=40))
def test_only_a_possible_beginning_of_a_marker_and_white_space_are_held_back(text: str) -> None:
    reader = OutputReader(format_by_name("hermes"), TOOLS)
    text, released = f"a{text}".replace("<tool_call>", ""), ""
    for end, char in enumerate(text, 1):
        events = reader.push([char])
        released += "".join(event.text for event in events if isinstance(event, TextDelta))
        held = text[len(released) : end]
        assert released + held == text[:end]
        assert held.lstrip(" ") in {"<tool_call>"[:length] for length in range(11)}


LONG = {
    "white space": ("hermes", "\n{}", "\n"),
    "reasoning of white space": ("hermes", "<think>{}", " "),
    "a number": ("hermes", '<tool_call>{{"name": "shell", "arguments": {{"a": {}', "1"),
    "a header": ("harmony", "<|channel|>{}", "a"),
    "an end tag": ("qwen3-coder", "<function=shell><parameter=a>b</parameter>{}", "\n"),
}


@pytest.mark.parametrize("case", LONG)
def test_the_time_to_read_is_linear_in_the_length(case: str) -> None:
    name, start, character = LONG[case]

    def seconds(length: int) -> float:
        text, begin = start.format(character * length), time.process_time()
        read(text, name, size=1)
        return time.process_time() - begin

    short, long = min(seconds(2_000) for _ in range(3)), seconds(32_000)
    assert long < 128 * short  # 16 times if linear, 256 times if quadratic


@pytest.mark.parametrize("length", [999, 1000, 1001, 1024, 5000])
@pytest.mark.parametrize("case", LONG)
def test_long_runs_are_read_the_same_in_any_division(case: str, length: int) -> None:
    name, start, character = LONG[case]
    ends = {"a header": "<|message|>Hi", "an end tag": "</function>"}
    text = start.format(character * length) + ends.get(case, "!")
    outputs = [described(read(text, name, size=size)) for size in (1, 7, 10**9)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_arguments_are_streamed_as_they_come() -> None:
    reader = OutputReader(format_by_name("hermes"), TOOLS, lambda: "id")
    events = reader.push(['<tool_call>{"name": "shell", "arguments": {"command": "ls'])
    assert events == [CallStarted(0, "id", "shell"), CallArguments(0, '{"command": "ls')]
    assert reader.push([' -l"']) == [CallArguments(0, ' -l"')]
    assert reader.push(["}"]) == [CallArguments(0, "}"), CallEnded(0)]
    assert reader.push(["}</tool_call>"]) + reader.finish() == []


def test_control_tokens_around_text_are_no_text() -> None:
    """Those of the reasoning and of the response, wherever they are; other ones are, in a call."""
    gemma = format_by_name("gemma4", FORMATS["gemma4"].markers)
    close, call = (gemma.markers.index(text) for text in ("<channel|>", "<|tool_call>"))
    assert read_pieces(["Hello", close, " you", call, "what"], gemma).text == (
        "Hello you<|tool_call>what"
    )
    command = format_by_name("command-r7b", FORMATS["command-r7b"].markers)
    start, end = (command.markers.index(f"<|{text}_RESPONSE|>") for text in ("START", "END"))
    assert read_pieces([start, "Hi.", end], command).text == "Hi."


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
def test_lines_around_an_answer_in_markers_are_no_text(size: int) -> None:
    for name, start, end in (
        ("ernie", "<response>", "</response>"),
        ("apriel", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    ):
        assert described(read(f"{start}\nHi.\n{end}\n", name, size)) == ["Hi."]
        assert described(read(f"\n{start}\n\nHi.\nA{end}\n\nB.\n", name, size)) == [
            "Hi.\nA\n\nB.\n"
        ]


CASES = [(name, tokens) for name in FORMS for tokens in (False, True)]


def read_pieces(
    pieces: Sequence[str | int],
    output_format: OutputFormat,
    cuts: Iterable[int] = (),
    starts_in_reasoning: bool = False,
    forced: bool = False,
) -> Output:
    """Read characters and control tokens that are divided at some places."""
    numbers = itertools.count()
    reader = OutputReader(
        output_format,
        WRITTEN_TOOLS,
        lambda: f"call_{next(numbers)}",
        starts_in_reasoning,
        forced,
        control_text=lambda token: output_format.markers[token],
    )
    events = []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(pieces)]):
        events += reader.push(joined(pieces[start:end]))
    events += reader.finish()
    assert joined_output(events) == reader.output
    return reader.output


def joined(pieces: Sequence[str | int]) -> list[str | int]:
    """Join neighbouring characters."""
    result: list[str | int] = []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        items = list(group)
        result += ["".join(map(str, items))] if is_text else items
    return result


def parts_of(output: Output) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for part in output.parts:
        if hasattr(part, "arguments"):
            assert part.complete
            result.append(("call", (part.name, json.loads(part.arguments))))
        else:
            kind = "reasoning" if type(part).__name__ == "ReasoningPart" else "text"
            result.append((kind, part.text.strip()))
    return result


def check_written(name: str, tokens: bool, data: st.DataObject) -> None:
    form = FORMS[name]
    answer = data.draw(written_answers(form))
    output_format = format_of(form, tokens)
    pieces = answer.pieces(output_format)
    whole = read_pieces(pieces, output_format)
    assert parts_of(whole) == list(answer.parts)
    cuts = data.draw(st.lists(st.integers(0, len(pieces)), max_size=12))
    assert read_pieces(pieces, output_format, cuts) == whole
    assert read_pieces(pieces, output_format, range(len(pieces))) == whole


@pytest.mark.parametrize(("name", "tokens"), CASES)
@settings(max_examples=examples(6))
@given(data=st.data())
def test_an_answer_in_any_form_is_read_as_it_was_written(
    name: str, tokens: bool, data: st.DataObject
) -> None:
    check_written(name, tokens, data)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), CASES)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_many_answers_in_any_form_are_read_as_they_were_written(
    name: str, tokens: bool, data: st.DataObject
) -> None:
    check_written(name, tokens, data)


_GARBAGE = (
    *("{", "}", "[", "]", '"', ",", ":", "\\", "(", ")", "=", ">", "\n", " ", "```", "```json\n"),
    *("weather", "run_shell(", "assistant", " to=functions.weather", "text", "call:weather{"),
    *('{"name": "weather", ', '"arguments": ', '"parameters": {"a": 1', "<function=weather>"),
    *("<parameter=text>\n", "\n</parameter>", "</function>", "json", "final", "analysis"),
)


@st.composite
def garbage(draw: st.DrawFn, output_format: OutputFormat) -> list[str | int]:
    """Markers, parts of calls, and words `w0.`, `w1.` and so on."""
    words = st.integers(0, 9).map(lambda number: f"w{number}.")
    markers = st.sampled_from(output_format.markers)
    result: list[str | int] = []
    for item in draw(st.lists(markers | st.sampled_from(_GARBAGE) | words, max_size=25)):
        if item in output_format.control_markers:
            result.append(output_format.markers.index(item))
        else:
            result += item
    return result


def check_garbage(name: str, tokens: bool, data: st.DataObject) -> None:
    """Neither an error nor a lost word, and the same in all divisions."""
    output_format = format_of(FORMS[name], tokens)
    pieces = data.draw(garbage(output_format))
    starts_in_reasoning = data.draw(st.booleans())
    forced = data.draw(st.booleans())
    whole = read_pieces(pieces, output_format, (), starts_in_reasoning, forced)
    cuts = data.draw(st.lists(st.integers(0, len(pieces)), max_size=12))
    for places in (cuts, range(len(pieces))):
        divided = read_pieces(pieces, output_format, places, starts_in_reasoning, forced)
        assert divided == whole
    for call in whole.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    if not output_format.channels and not forced:  # headers of channels have words
        read_words = "".join(
            part.text if hasattr(part, "text") else part.id + part.arguments for part in whole.parts
        )
        written = re.findall(r"w\d\.", "".join(map(str, pieces)))
        assert Counter(re.findall(r"w\d\.", read_words)) >= Counter(written)


@pytest.mark.parametrize(("name", "tokens"), CASES)
@settings(max_examples=examples(8))
@given(data=st.data())
def test_garbage_loses_no_text(name: str, tokens: bool, data: st.DataObject) -> None:
    check_garbage(name, tokens, data)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), CASES)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_much_garbage_loses_no_text(name: str, tokens: bool, data: st.DataObject) -> None:
    check_garbage(name, tokens, data)
