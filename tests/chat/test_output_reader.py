"""Answers are read as they were written, in any division into pieces."""

import itertools

import pytest

from kvkeep.chat.messages import Tool
from kvkeep.chat.output import Output, joined_output
from kvkeep.chat.output_format import format_by_name
from kvkeep.chat.output_reader import OutputReader

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
            ['{"name": "weather", "arguments": {"city": "Rome"}}'],
        ),
        ("a <tool_ca", ["a <tool_ca"]),
    ],
)
def test_hermes_calls_are_read(text: str, expected: list[object], size: int) -> None:
    assert described(read(text, size=size)) == expected


@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_a_forced_call_that_is_cut_off_is_an_incomplete_call(size: int) -> None:
    text = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert described(read(text, size=size, forced=True)) == [("weather", '{"city": "Rome"}', True)]
    for length in range(len('{"name": "w'), len(text) - 1):
        ((name, arguments, complete),) = described(read(text[:length], size=size, forced=True))
        assert name == "weather"
        assert '{"city": "Rome"}'.startswith(arguments)
        assert complete == (arguments == '{"city": "Rome"}')
