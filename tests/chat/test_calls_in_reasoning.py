"""Calls that models write before the end of their reasoning are calls."""

import json

import pytest

from kvkeep.chat.output_format import format_by_name
from kvkeep.chat.output_reader import OutputReader
from tests.chat.test_output_reader import TOOLS, described, read

QWEN35 = (
    "<tool_call>\n<function=weather>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
)
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<tool_call>weather\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
IN_REASONING = {"qwen3-coder": QWEN35, "hermes": JSON_CALL, "glm": GLM_CALL}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("name", IN_REASONING)
def test_a_call_inside_open_reasoning_is_a_call(name: str, size: int) -> None:
    """Models leave out the end of the reasoning, or write it behind the call."""
    call = IN_REASONING[name]
    for text, expected in (
        (f"I look.\n{call}", ["I look.", "weather"]),
        (call, ["weather"]),
        (f"I look.\n  {call}\n{call}", ["I look.", "weather", "weather"]),
        (f"I look.\n{call}\n</think>\n\nDone.", ["I look.", "weather", "Done."]),
        (f"I look.\n{call}\n</think>\n\n{call}", ["I look.", "weather", "weather"]),
    ):
        output = read(text, name, size, starts_in_reasoning=True)
        assert [part if isinstance(part, str) else part[0] for part in described(output)] == (
            expected
        )
        assert all(json.loads(call.arguments) == {"a": 1} for call in output.calls)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize(
    "text",
    [
        f"The form is {JSON_CALL}",
        QWEN35.replace("weather", "other"),
        JSON_CALL.replace("weather", "other"),
        GLM_CALL.replace("weather", "other"),
        "I could call\n<tool_call>\nor weather",
        '<tool_call>\n{"name": "',
        '<tool_call>\n{"name": "weath',
        '<tool_call>{"name": "other", "arguments": {"a": "',
        "<tool_call>weather is the one\n<tool_call>\n",
    ],
)
def test_other_tags_inside_reasoning_are_reasoning(text: str, size: int) -> None:
    """The end of the reasoning ends it, whatever is open before it."""
    output = read(f"{text}\n</think>\n\nHi.", "glm", size, starts_in_reasoning=True)
    assert described(output) == [text.strip(), "Hi."]
    assert not output.calls
    assert output.text == "Hi."


@pytest.mark.parametrize("name", IN_REASONING)
def test_reasoning_before_a_constrained_answer_has_no_calls(name: str) -> None:
    """Nor does reasoning without tools: a grammar holds behind its end."""
    text = f"Hm.\n{IN_REASONING[name]}"
    for tools, constrained in ((TOOLS, True), ([], False)):
        reader = OutputReader(
            format_by_name(name), tools, starts_in_reasoning=True, constrained=constrained
        )
        reader.push([f"{text}</think>Hi."])
        reader.finish()
        assert described(reader.output) == [text, "Hi."]
