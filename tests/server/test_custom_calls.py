"""The input of custom tools' calls, read from the JSON of their arguments as it comes."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvkeep.chat.messages import Tool
from kvkeep.chat.openai_tools import custom_parameters
from kvkeep.chat.output import CallArguments, CallEnded, CallStarted, OutputEvent
from kvkeep.server.openai import custom_calls
from kvkeep.server.openai.custom_calls import CustomInput, generated_input
from kvkeep.server.openai.response_items import ResponseItems
from kvkeep.server.openai.response_request import ResponsesRequest

OPENINGS = [
    '{"input": "',
    ' {\n"input":"',
    '{"other": "a", "input": "',
    '{"inputs": "',
    '{"input": ["',
]
CHARACTERS = ["a", "é", "😀", " ", "u", "d83d", r"\n", r"\"", r"\\", r"\/", r"\u00e9", r"\ud7ff"]
CHARACTERS += [r"\ud83d\ude00", r"\uDBFF\uDFFF"]
FAULTS = [
    r"\ud83d",
    r"\ude00",
    r"\u00",
    r"\q",
    "\n",
    '"',
    "\\",
    "{",
    "}",
    ",",
    ":",
    '", "input": "',
]
ENDS = ["", '"', '"}', '", "other": "a"}', '", "input": "abc"}', '", "input": 3}']


@st.composite
def deltas(draw: st.DrawFn) -> list[str]:
    """Draw the arguments of a call, mostly valid JSON, in pieces."""
    alphabet = draw(st.sampled_from([CHARACTERS, [*CHARACTERS, *FAULTS]]))
    text = draw(st.sampled_from(OPENINGS))
    text += "".join(draw(st.lists(st.sampled_from(alphabet), max_size=8)))
    text += draw(st.sampled_from(ENDS))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)))))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def streamed_again(pieces: Sequence[str]) -> list[str]:
    """Return what the input has in addition after each piece, with all of the JSON read again."""
    sent, result = "", []
    for number in range(1, len(pieces) + 1):
        text = generated_input("".join(pieces[:number]), complete=False)
        result.append(text[len(sent) :] if text.startswith(sent) else "")
        sent += result[-1]
    return result


@given(pieces=deltas())
@example(pieces=[*r'{"input": "\ud83d\ude00\u00e9\\\"a", "input": "\ud83d\ude00b"}'])
@example(pieces=['{"input": "a', "b\\", 'n" ', ', "input": "ab', '\\nc"}'])
@example(pieces=['{"input": "a', "b\\q", 'c"}'])
@example(pieces=['{"input": "a', "b\\ud83d", 'c"}'])
def test_the_input_is_the_same_as_if_all_of_it_were_read_again(pieces: list[str]) -> None:
    custom_input = CustomInput()
    expected = streamed_again(pieces)
    assert [custom_input.push(piece) for piece in pieces] == expected
    assert custom_input.text == "".join(expected)


def test_a_long_input_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, from_json = 0, custom_calls.from_json

    def counted(text: str, **fields: Any) -> Any:
        nonlocal decoded
        decoded += len(text)
        return from_json(text, **fields)

    monkeypatch.setattr(custom_calls, "from_json", counted)
    text = "line of a patch\n" * 100
    arguments = json.dumps({"input": text})
    answer: list[OutputEvent] = [CallStarted(0, "id", "c")]
    answer += [CallArguments(0, arguments[i : i + 4]) for i in range(0, len(arguments), 4)]
    tools = (Tool("c", parameters=custom_parameters(), kind="custom"),)
    items = ResponseItems(ResponsesRequest(input="x"), tools)
    events = [event for part in [*answer, CallEnded(0)] for event in items.push(part)]
    deltas = [fields["delta"] for kind, fields in events if kind.endswith("input.delta")]
    assert "".join(deltas) == items.items[0]["input"] == text
    assert len(deltas) > 100
    assert decoded < 5 * len(arguments)
