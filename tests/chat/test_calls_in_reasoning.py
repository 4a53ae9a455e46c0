"""Calls that models write before the end of their reasoning are calls."""

import json

import pytest

from kvkeep.chat.formats.registry import format_by_name
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
        (f"```\nx\n```\n{call}", ["```\nx\n```", "weather"]),
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


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("name", IN_REASONING)
def test_what_follows_a_call_inside_reasoning_is_reasoning_up_to_its_end(
    name: str, size: int
) -> None:
    call = IN_REASONING[name]
    output = read(
        f"A.\n{call}\nB.\n{call}C.\n</think>\n\nHi.", name, size, starts_in_reasoning=True
    )
    parts = [part if isinstance(part, str) else part[0] for part in described(output)]
    assert parts == ["A.", "weather", "B.", "weather", "C.", "Hi."]
    assert output.text == "Hi."
    output = read(f"A.\n{call}\nB.", name, size, starts_in_reasoning=True)
    assert output.text == ""
    output = read(f"A.\n{call}\n<think>B.</think>Hi.", name, size, starts_in_reasoning=True)
    assert described(output)[2:] == ["B.", "Hi."]
    assert output.text == "Hi."


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("name", IN_REASONING)
def test_a_call_in_code_inside_reasoning_is_reasoning(name: str, size: int) -> None:
    call = IN_REASONING[name]
    indented = call.replace("\n", "\n    ")
    for text in (f"As:\n```\n{call}\n```", f"As:\n~~~\n{call}", f"As:\n\n    {indented}"):
        output = read(f"{text}\n</think>\n\nHi.", name, size, starts_in_reasoning=True)
        assert described(output) == [text, "Hi."]


FAMILY_CALLS = {
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="a">1</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "olmo3": "<function_calls>\nweather(a=1)\n</function_calls>",
    "apertus": '<|tools_prefix|>[{"weather": {"a": 1}}]<|tools_suffix|>',
    "lfm2": "<|tool_call_start|>[weather(a=1)]<|tool_call_end|>",
    "mistral": '[TOOL_CALLS]weather[ARGS]{"a": 1}',
    "seed-oss": QWEN35.replace("tool_call>", "seed:tool_call>"),
    "nemotron2": '<TOOLCALL>[{"name": "weather", "arguments": {"a": 1}}]</TOOLCALL>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"a": 1}}]',
    "apriel": '<tool_calls>[{"name": "weather", "arguments": {"a": 1}}]</tool_calls>',
    "command-r7b": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": {"a": 1}}]<|END_ACTION|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": "<|tool_call>call:weather{a:1}<tool_call|>",
    "function-gemma": "<start_function_call>call:weather{a:1}<end_function_call>",
    "llama3": '<|python_tag|>{"name": "weather", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("size", [1, 3, 10**9])
@pytest.mark.parametrize("name", FAMILY_CALLS)
def test_a_call_inside_reasoning_may_have_each_form_of_tags(name: str, size: int) -> None:
    call = FAMILY_CALLS[name]
    reasoning = format_by_name(name).reasoning[0]
    output = read(f"A.\n{call}\n{reasoning.end}Hi.", name, size, starts_in_reasoning=True)
    assert [part if isinstance(part, str) else part[0] for part in described(output)] == [
        *("A.", "weather", "Hi.")
    ]
    assert output.text == "Hi."
    assert json.loads(output.calls[0].arguments) == {"a": 1}
    assert output.calls[0].complete
    other = call.replace("weather", "other")
    output = read(f"A.\n{other}\n{reasoning.end}Hi.", name, size, starts_in_reasoning=True)
    assert described(output) == [f"A.\n{other}", "Hi."]
