"""An answer that follows a JSON schema is text, whatever its strings contain."""

import itertools
import json
from typing import Any

import pytest
from chat.written_answers import FORMS, TOOLS, Form, format_of, marked
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.formats.registry import FORMATS, format_by_name
from kvkeep.chat.output import Output
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.output_reader import OutputReader

NAMES = [tool.name for tool in TOOLS]
CALL = ("weather", {"text": "a </tool_call> b"})
_STRINGS = [text.replace("\x00", "") for form in FORMS.values() for text in form.reasoning]
_STRINGS += [form.write_calls([CALL]).replace("\x00", "") for form in FORMS.values()]
_STRINGS += [marker for output_format in FORMATS.values() for marker in output_format.markers]
_words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5)
_strings = st.lists(st.sampled_from([*_STRINGS, *NAMES]) | _words).map("".join)
_keys = st.sampled_from(["name", "arguments", "parameters", "function"]) | _strings
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | _strings,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(_keys, values, max_size=4),
)


def read(
    pieces: list[str | int],
    output_format: OutputFormat,
    schema_calls: list[str],
    starts_in_reasoning: bool = False,
    cuts: tuple[int, ...] = (),
) -> Output:
    reader = OutputReader(
        output_format,
        TOOLS,
        lambda: "id",
        starts_in_reasoning,
        control_text=lambda token: output_format.markers[token],
        schema_calls=schema_calls,
    )
    places = [0, *sorted(cuts), len(pieces)]
    for start, end in itertools.pairwise(places):
        reader.push(pieces[start:end])
    reader.finish()
    return reader.output


def pieces_of(text: str, output_format: OutputFormat) -> list[str | int]:
    """Return characters, and ids of the marked control tokens."""
    result: list[str | int] = []
    for index, part in enumerate(text.split("\x00")):
        is_control = index % 2 and part in output_format.control_markers
        result += [output_format.markers.index(part)] if is_control else part
    return result


def in_channel(text: str, form: Form) -> str:
    final = marked("<|channel|>") + "final" + marked("<|message|>")
    return final + text if form.output_format == "harmony" else text


@given(
    value=_values,
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    form=st.sampled_from(list(FORMS.values())),
    control_tokens=st.booleans(),
    reasons=st.booleans(),
    data=st.data(),
)
def test_an_answer_by_a_schema_is_text_to_the_byte(
    value: Any,
    indent: int | None,
    ascii_only: bool,
    form: Form,
    control_tokens: bool,
    reasons: bool,
    data: st.DataObject,
) -> None:
    answer = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    text = in_channel(answer, form)
    if reasons:
        between = marked("<|start|>") + "assistant" if form.output_format == "harmony" else "\n\n"
        text = f"{form.reasoning[0]}Hm.{form.reasoning[1]}{between}{text}"
    output_format = format_of(form, control_tokens)
    pieces = pieces_of(text, output_format)
    cuts = data.draw(st.lists(st.integers(0, len(pieces)), max_size=4))
    output = read(pieces, output_format, [], cuts=tuple(cuts))
    assert (output.text, output.calls) == (answer, [])
    assert output.reasoning == ("Hm." if reasons else "")


@pytest.mark.parametrize("control_tokens", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_beside_a_schema(name: str, control_tokens: bool) -> None:
    form = FORMS[name]
    output_format = format_of(form, control_tokens)
    between = marked("<|start|>") + "assistant" if form.output_format == "harmony" else "\n"
    values = {"text": "a", "count": 1}
    calls = form.write_calls([("weather", values), ("run_shell", values)])
    text = f"{form.reasoning[0]}Hm.{form.reasoning[1]}{between}{calls}"
    for cuts in ((), range(len(text))):
        pieces = pieces_of(text, output_format)
        cut = tuple(place for place in cuts if place < len(pieces))
        output = read(pieces, output_format, NAMES, cuts=cut)
        assert [(c.name, json.loads(c.arguments)) for c in output.calls] == [
            ("weather", values),
            ("run_shell", values),
        ]
        assert (output.text, output.reasoning) == ("", "Hm.")


BARE_CALL = '{"name": "weather", "parameters": {"text": "a"}}'


@pytest.mark.parametrize(
    ("text", "names", "is_call"),
    [
        (BARE_CALL, ["weather"], True),
        (f"\n{BARE_CALL}; {BARE_CALL}", NAMES, True),
        (BARE_CALL, ["run_shell"], False),
        (BARE_CALL, [], False),
        (BARE_CALL.replace("parameters", "age"), NAMES, False),
        (BARE_CALL.replace(" ", ""), NAMES, False),
        (f"[{BARE_CALL}]", NAMES, False),
        ('{"name": "weather", "age": 3}', NAMES, False),
        (f'{{"a": {BARE_CALL}}}', NAMES, False),
    ],
)
def test_bare_json_beside_a_schema_is_a_call_only_in_the_exact_form(
    text: str, names: list[str], is_call: bool
) -> None:
    for cuts in ((), tuple(range(len(text)))):
        output = read(list(text), format_by_name("llama3"), names, cuts=cuts)
        assert bool(output.calls) == is_call
        assert is_call or output.text == text


def test_text_that_is_no_json_is_read_as_without_a_schema() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for text in ("I look.", "the place?", "nowhere"):
        output = read(list(f"{text}\n{call}"), format_by_name("hermes"), [])
        assert (output.text, len(output.calls)) == (text, 1)
