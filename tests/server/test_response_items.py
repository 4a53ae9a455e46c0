"""Items of a response, and the events of their streaming, from the events of an answer."""

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.messages import Tool
from kvkeep.chat.openai_tools import custom_parameters
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvkeep.server.chat_input import StopAfterFirstCall
from kvkeep.server.openai.response_items import ItemEvent, ResponseItems
from kvkeep.server.openai.response_request import ResponsesRequest

TOOLS = (Tool("f"), Tool("c", parameters=custom_parameters(), kind="custom"))
DELTA_FIELDS = {  # event of the whole, and its field, by the event of a part
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.reasoning_summary_text.delta": ("response.reasoning_summary_text.done", "text"),
    "response.function_call_arguments.delta": (
        "response.function_call_arguments.done",
        "arguments",
    ),
    "response.custom_tool_call_input.delta": ("response.custom_tool_call_input.done", "input"),
}


@st.composite
def answers(draw: st.DrawFn) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "f", "c"]), max_size=6)):
        text = draw(st.text(min_size=1, max_size=8))
        if kind == "text":
            events.append(TextDelta(text))
        elif kind == "reasoning":
            events.append(ReasoningDelta(text))
        else:
            arguments = json.dumps({"input": text})
            cut = draw(st.integers(0, len(arguments)))
            complete = kind == "f" or draw(st.booleans())
            events += [
                CallStarted(calls, f"call_{calls}", kind),
                CallArguments(calls, arguments[:cut]),
                CallArguments(calls, arguments[cut:] if complete else ""),
                CallEnded(calls, complete),
            ]
            calls += 1
    return events


def items_and_events(
    answer: list[OutputEvent], status: str = "completed", **fields: Any
) -> tuple[list[dict[str, Any]], list[ItemEvent]]:
    items = ResponseItems(ResponsesRequest(input="x", **fields), TOOLS)
    events = [event for part in answer for event in items.push(part)]
    return items.items, [*events, *items.finish(status)]


@given(answer=answers(), summary=st.sampled_from([None, "auto"]))
def test_streamed_parts_are_the_items(answer: list[OutputEvent], summary: str | None) -> None:
    items, events = items_and_events(answer, reasoning={"summary": summary})
    assert items
    done = [fields["item"] for kind, fields in events if kind == "response.output_item.done"]
    assert done == items
    added = [
        fields["item"]["id"] for kind, fields in events if kind == "response.output_item.added"
    ]
    assert added == [item["id"] for item in items]
    deltas: defaultdict[tuple[str, str], str] = defaultdict(str)
    for kind, fields in events:
        if kind in DELTA_FIELDS:
            deltas[fields["item_id"], DELTA_FIELDS[kind][0]] += fields["delta"]
    for kind, field in DELTA_FIELDS.values():
        for done_kind, fields in events:
            if done_kind == kind:
                assert deltas[fields["item_id"], kind] == fields[field]


def test_the_order_of_events() -> None:
    answer = [
        ReasoningDelta("Hm."),
        TextDelta("\n\n"),
        TextDelta("See."),
        CallStarted(0, "a", "f"),
        CallArguments(0, "{}"),
        CallEnded(0),
        TextDelta("\n"),
    ]
    items, events = items_and_events(answer)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[1]["content"][0]["text"] == "\n\nSee."
    assert [kind.removeprefix("response.") for kind, _ in events] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [fields["output_index"] for _, fields in events] == [0] * 6 + [1] * 6 + [2] * 4


@pytest.mark.parametrize(
    "answer",
    [
        [TextDelta("A")],
        [ReasoningDelta("A")],
        [CallStarted(0, "a", "f"), CallArguments(0, '{"x'), CallEnded(0, complete=False)],
        [CallStarted(0, "a", "c"), CallArguments(0, '{"input": "A')],
    ],
    ids=["text", "reasoning", "function", "custom"],
)
def test_an_item_that_is_cut_off_is_incomplete(answer: list[OutputEvent]) -> None:
    (item,), _ = items_and_events(answer, "incomplete")
    assert item["status"] == "incomplete"


def test_white_space_that_was_held_back_keeps_its_logprobs() -> None:
    items = ResponseItems(ResponsesRequest(input="x"), TOOLS)
    parts = [("\n", "first"), ("\n", "second"), ("See.", "third")]
    events = [event for text, token in parts for event in items.push(TextDelta(text), [token])]
    events += items.finish("completed")
    (part,) = items.items[0]["content"]
    assert (part["text"], part["logprobs"]) == ("\n\nSee.", ["first", "second", "third"])
    deltas = [fields["logprobs"] for kind, fields in events if kind.endswith("text.delta")]
    assert deltas == [["first", "second", "third"]]


def test_logprobs_of_white_space_alone_are_in_the_empty_answer() -> None:
    items = ResponseItems(ResponsesRequest(input="x"), TOOLS)
    assert list(items.push(TextDelta(" "), ["only"])) == []
    list(items.finish("completed"))
    assert items.items[0]["content"][0]["logprobs"] == ["only"]


def test_an_empty_answer_is_an_empty_message() -> None:
    (item,), _ = items_and_events([])
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_the_input_of_a_custom_tool_is_streamed_as_text() -> None:
    answer = [CallStarted(0, "a", "c"), *(CallArguments(0, c) for c in '{"input": "A\\nB"}')]
    (item,), events = items_and_events([*answer, CallEnded(0)])
    assert item["input"] == "A\nB"
    deltas = [fields["delta"] for kind, fields in events if kind.endswith("input.delta")]
    assert deltas == ["A", "\n", "B"]


def test_an_answer_of_one_call_ends_with_it() -> None:
    calls: list[OutputEvent] = [
        event
        for index in range(2)
        for event in (
            CallStarted(index, f"call_{index}", "f"),
            CallArguments(index, "{}"),
            CallEnded(index),
        )
    ]
    end = StopAfterFirstCall(None)
    assert end.up_to_first_call(calls[:2]) == calls[:2]
    assert not end.complete
    assert end.up_to_first_call(calls[2:]) == calls[2:3]
    assert end.complete
    assert end.up_to_first_call(calls) == []
