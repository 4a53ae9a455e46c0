"""Calls that models write without a marker, where they are certainly calls."""

import pytest

from kvkeep.chat.output_format import format_by_name
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
    ROME.replace("weather", "other"),
    "As:\n" + ROME.replace("weather", "other"),
    'As:\n{"name": "weather"}',
    'As:\n{"name": "weather", "parameters": [1]}',
    'As:\n{"name": "weather", "city": "Rome"}\nand so on',
    "[weather]: it is fine",
    '[other(city="Rome")]',
    "<|python_tag|>print(1)",
    "As:\n{",
    'As:\n{"name": "weath',
    "<function=other>{}</function>",
)
SIZES = (1, 2, 3, 7, 10**9)


def check(text: str, name: str, expected: list[object]) -> None:
    for size in SIZES:
        assert described(read(text, name, size)) == expected, size


@pytest.mark.parametrize("text", LLAMA)
def test_calls_of_llama_may_follow_text_or_be_as_in_python(text: str) -> None:
    check(text, "llama3", LLAMA[text])


def test_what_only_looks_like_a_call_of_llama_is_text() -> None:
    for text in LLAMA_TEXTS:
        check(text, "llama3", [text])


def test_bare_calls_are_text_without_tools_or_behind_a_grammar() -> None:
    for text in (*LLAMA, ROME):
        if text[0] != "<":
            reader = OutputReader(format_by_name("llama3"))
            reader.push([text])
            reader.finish()
            assert described(reader.output) == [text]
    text = f"Sure.\n{ROME}"
    for settings in ({"constrained": True}, {"schema_calls": ["weather"]}):
        reader = OutputReader(format_by_name("llama3"), TOOLS, **settings)  # type: ignore[arg-type]
        reader.push([text])
        reader.finish()
        assert described(reader.output) == [text]


def test_text_is_held_back_only_while_a_call_may_come() -> None:
    reader = OutputReader(format_by_name("llama3"), TOOLS)
    reader.push(['A\n{"name": "wea'])
    assert reader.output.text == "A"
    reader.push(['r"'])
    assert reader.output.text == 'A\n{"name": "wear"'
