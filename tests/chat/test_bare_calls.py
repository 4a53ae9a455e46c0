"""Calls that models write without a marker, where they are certainly calls."""

from typing import Any

import pytest

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.chat.output_reader import OutputReader
from tests.chat.test_output_reader import TOOLS, described, read

ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
WEATHER = ("weather", '{"city": "Rome"}', True)
LLAMA = {
    f"Sure.\n\n{ROME}": ["Sure.", WEATHER],
    f"Sure.\n  {ROME}\nWait.": ["Sure.", WEATHER, "\nWait."],
    f"Sure.\n{ROME}; {ROME}": ["Sure.", WEATHER, WEATHER],
    f"{{}}\n{ROME}": ["{}", WEATHER],
    f"`x`\n{ROME}": ["`x`", WEATHER],
    f"```\nx\n```\n{ROME}": ["```\nx\n```", WEATHER],
    f"Use ``` for code.\n{ROME}": ["Use ``` for code.", WEATHER],
    f"```x```\n{ROME}": ["```x```", WEATHER],
    f"~~~\n```\n~~~\n{ROME}": ["~~~\n```\n~~~", WEATHER],
    f"````\n```\n`````  \n{ROME}": ["````\n```\n`````", WEATHER],
    'Sure.\n{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}': [
        "Sure.",
        WEATHER,
    ],
    'Sure.\n{ "name" : "weather",\n"arguments": {"city": "Rome"}}': ["Sure.", WEATHER],
    '<|python_tag|>weather.call(city="Rome")': [WEATHER],
    '<|python_tag|>weather(city="Rome")': [WEATHER],
    '[weather(city="Rome"), shell()]': [WEATHER, ("shell", "{}", True)],
    '<function=weather>{"city": "Rome"}</function>': [WEATHER],
    'Well.\n<function=weather>{"city": "Rome"}</function>': ["Well.", WEATHER],
}
LLAMA_TEXTS = (
    f"It is {ROME}",
    f"```json\n{ROME}\n```",
    f"As:\n```\n{ROME}\n```\n",
    f"As:\n~~~\n{ROME}\n~~~\n",
    f"As:\n~~~ `a`\n{ROME}\n~~~\n",
    f"As:\n\n    {ROME}\n",
    f"As:\n\n \t{ROME}\n",
    f"As:\n````\n```\n{ROME}\n````\n",
    f"As:\n```\n```json\n{ROME}\n```\n",
    f"As:\n```\n    ```\n{ROME}\n```\n",
    f"Use ``` as:\n   ```\n{ROME}\n```\n",
    ROME.replace("weather", "other"),
    "As:\n" + ROME.replace("weather", "other"),
    'As:\n{"name": "weather"}',
    'As:\n{"name": "weather", "parameters": [1]}',
    'As:\n{"name": "weather", "city": "Rome"}\nand so on',
    "[weather]: it is fine",
    "[weather(Rome)](http://x) is a link",
    "[weather(today) is bad]",
    "[weather(",
    '[other(city="Rome")]',
    "<|python_tag|>print(1)",
    "As:\n{",
    'As:\n{"name": "weath',
    "<function=other>{}</function>",
    "The tag <function=weather> begins a call.",
    "The tag\n<function=weather>\nbegins a call.",
    "<function=weather>",
    "It is <function=weather>{}</function>",
    "`<function=weather>{}</function>` is a call.",
    "As:\n```\n<function=weather>{}</function>\n```\n",
    "As:\n\n    <function=weather>{}</function>\n",
)
ROME_ARGUMENTS = ROME.replace("parameters", "arguments")
HERMES = {
    ROME_ARGUMENTS: [WEATHER],
    f"\n{ROME_ARGUMENTS}\n{ROME}": [WEATHER, WEATHER],
    f"[{ROME_ARGUMENTS}, {ROME}]": [WEATHER, WEATHER],
    f"```json\n{ROME_ARGUMENTS}\n```": [WEATHER],
    f"```json\n[{ROME_ARGUMENTS}]\n```\nNow wait.": [WEATHER, "Now wait."],
    f"```\n{ROME_ARGUMENTS}\n```\n```json\n{ROME}\n```": [WEATHER, WEATHER],
    f"<tools>\n{ROME_ARGUMENTS}\n</tools>": [WEATHER],
    f"<think>\nHm.\n</think>\n\n{ROME_ARGUMENTS}": ["Hm.", WEATHER],
    f'{{"type": "function", "function": {ROME_ARGUMENTS}}}': [WEATHER],
    '[weather(city="Rome")]': [WEATHER],
    'weather\n{"city": "Rome"}': [WEATHER],
    "weather\n{}": [("weather", "{}", True)],
    'weather\n{\n  "city": "Rome"}': [("weather", '{\n  "city": "Rome"}', True)],
    "[weather( city = 'Rome')]": [WEATHER],
    "[weather()]": [("weather", "{}", True)],
    'weather\n{"city": "Ro': [("weather", '{"city": "Ro', False)],
}
HERMES_TEXTS = (
    f"The call is {ROME_ARGUMENTS}",
    f"The call is\n{ROME_ARGUMENTS}",
    f"As:\n```json\n{ROME_ARGUMENTS}\n```",
    '{"name": "weather"}',
    '{"name": "weather", "city": "Rome"}',
    '{"name": "weather", "arguments": "Rome"}',
    '```json\n{"name": "weather"}\n```',
    '```python\nweather(city="Rome")\n```',
    ROME_ARGUMENTS.replace("weather", "other"),
    '{"city": "Rome", "name": "weather", "arguments": {}}',
    'other\n{"city": "Rome"}',
    "weather\nis fine",
    "weather\n{% template %} text",
    "weather\n{\n  color: red;\n}",
    "[weather(Rome)](http://x) is a link",
    '{"name": "weather", "arguments": null}',
    "weather",
    "<tools>\n[]\n</tools>",
    "[]",
    "{",
    "```",
)
FUNCTIONARY = {
    'weather\n{"city": "Rome"}': [WEATHER],
    'weather\n{"city": "Rome"}>>>shell\n{}': [WEATHER, ("shell", "{}", True)],
    'all\nSure.>>>weather\n{"city": "Rome"}': ["Sure.", WEATHER],
    "all\nSure.": ["Sure."],
    "all\nSure.\n>>>all\nWell.": ["Sure.\nWell."],
    "all\n>>>all\nSure.": ["Sure."],
    "all\n>>> 1 + 1\n2": [">>> 1 + 1\n2"],
    "Hall\nway": ["Hall\nway"],
    "all\nA>>>other\n{}": ["A>>>other\n{}"],
}
PHI = {
    f"<|tool_call|>[{ROME_ARGUMENTS}]<|/tool_call|>": [WEATHER],
    f"<|tool_call|>[{ROME_ARGUMENTS}]": [WEATHER],
}
SIZES = (1, 2, 3, 7, 10**9)


def check(text: str, name: str, expected: list[object]) -> None:
    for size in SIZES:
        assert described(read(text, name, size)) == expected, size


@pytest.mark.parametrize("text", LLAMA)
def test_calls_of_llama_may_follow_text_or_be_as_in_python(text: str) -> None:
    check(text, "llama3", LLAMA[text])


@pytest.mark.parametrize("text", HERMES)
def test_an_answer_may_begin_with_a_call_without_tags(text: str) -> None:
    """Qwen2.5-Coder, Hammer, xLAM and GLM-4 write it as JSON, in a fence, or below its name."""
    check(text, "hermes", HERMES[text])


def test_other_beginnings_of_an_answer_are_text() -> None:
    for text in HERMES_TEXTS:
        check(text, "hermes", [text])


def test_calls_of_functionary_and_phi_are_read() -> None:
    for name, answers in (("functionary", FUNCTIONARY), ("phi4-mini", PHI)):
        for text, expected in answers.items():
            check(text, name, expected)


def test_what_only_looks_like_a_call_of_llama_is_text() -> None:
    for text in LLAMA_TEXTS:
        check(text, "llama3", [text])


def test_bare_calls_are_text_without_tools_or_behind_a_grammar() -> None:
    settings: dict[str, Any]
    for name, text in (
        *(("llama3", text) for text in LLAMA if "<" not in text),
        *(("hermes", text) for text in HERMES if "<think>" not in text),
    ):
        without_tools = {"tools": ()}
        constrained = [{"constrained": True}, {"schema_calls": ["shell"]}]
        is_json = "weather(" not in text and "weather\n" not in text and text[:2] != "[w"
        is_at_start = name == "llama3" and text[0] in "{["
        for settings in (without_tools, *(constrained if is_json and not is_at_start else ())):
            reader = OutputReader(format_by_name(name), **{"tools": TOOLS, **settings})
            reader.push([text])
            reader.finish()
            assert described(reader.output) == [text]


def test_text_is_held_back_only_while_a_call_may_come() -> None:
    reader = OutputReader(format_by_name("llama3"), TOOLS)
    reader.push(['A\n{"name": "wea'])
    assert reader.output.text == "A"
    reader.push(['r"'])
    assert reader.output.text == 'A\n{"name": "wear"'


def test_arguments_that_are_text_are_not_held_back() -> None:
    for name, text in (
        ("hermes", '{"name": "weather", "arguments": "a'),
        ("hermes", '```json\n{"name": "weather", "arguments": [1'),
        ("llama3", 'A\n{"name": "weather", "parameters": "a'),
    ):
        reader = OutputReader(format_by_name(name), TOOLS)
        reader.push([text])
        assert reader.output.text == text


BESIDE_A_GRAMMAR = {
    "llama3": (ROME, '[weather(city="Rome")]', f"A\n{ROME}"),
    "hermes": ('[weather(city="Rome")]', 'weather\n{"city": "Rome"}', ROME_ARGUMENTS),
    "functionary": ('weather\n{"city": "Rome"}',),
}


@pytest.mark.parametrize("name", BESIDE_A_GRAMMAR)
def test_an_answer_by_gbnf_has_no_bare_calls(name: str) -> None:
    for text in BESIDE_A_GRAMMAR[name]:
        reader = OutputReader(format_by_name(name), TOOLS, constrained=True)
        reader.push([text])
        reader.finish()
        assert described(reader.output) == [text]


def test_a_name_and_json_are_a_call_beside_a_schema_and_where_one_is_forced() -> None:
    for settings in ({"schema_calls": []}, {"forced": True}):
        reader = OutputReader(
            format_by_name("functionary"), TOOLS, **{"constrained": True, **settings}
        )
        reader.push(['weather\n{"city": "Rome"}'])
        reader.finish()
        assert described(reader.output) == [WEATHER]


CODER = {
    "The tag <function=weather> begins a call.": ["The tag <function=weather> begins a call."],
    "The tag is <function=weather>": ["The tag is <function=weather>"],
    "<tool_call>\n<function=weather>\nis it": ["<tool_call>\n<function=weather>\nis it"],
    "Sure. <function=weather>\n</function>": ["Sure.", ("weather", "{}", True)],
    "<tool_call>\n<function=weather>\n</tool_call>": [("weather", "{}", True)],
    "<tool_call>\n<function=weather>\n": [("weather", "", False)],
    "<tool_call>\n<function=weather>\n<para": [("weather", "", False), "<para"],
}


@pytest.mark.parametrize("text", CODER)
def test_the_name_of_a_function_alone_begins_no_call(text: str) -> None:
    check(text, "qwen3-coder", CODER[text])


def test_a_quoted_invocation_of_minimax_is_text() -> None:
    text = '<minimax:tool_call>\n<invoke name="weather">\nis how it begins.'
    check(text, "minimax", [text])
