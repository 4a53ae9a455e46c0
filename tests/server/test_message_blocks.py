"""Content blocks of Anthropic's API: streamed ones put together are the whole ones."""

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    joined_output,
)
from kvkeep.server.anthropic.blocks import ContentBlockStream, content_blocks

TEXTS = st.text(min_size=1, max_size=5)


@st.composite
def event_lists(draw: st.DrawFn) -> list[OutputEvent]:
    """Draw the events of an answer. Only its last call can be cut off."""
    events: list[OutputEvent] = []
    for index in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["text", "reasoning", "call"]))
        if kind == "text":
            events += [TextDelta(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=3))]
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(TEXTS)))
        else:
            arguments = json.dumps(draw(st.dictionaries(TEXTS, TEXTS, max_size=2)))
            cut = draw(st.integers(0, len(arguments)))
            events.append(CallStarted(index, f"id_{index}", "a"))
            pieces = [arguments[:cut], arguments[cut:]]
            complete = draw(st.booleans())
            events += [CallArguments(index, piece) for piece in pieces[: 1 + complete] if piece]
            events.append(CallEnded(index, complete))
            if not complete:
                break
    return events


def accumulated(stream: Iterable[bytes]) -> list[dict[str, Any]]:
    """Put the blocks of a stream together, as clients do."""
    blocks: list[dict[str, Any]] = []
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    open_index, arguments = None, ""
    for data in stream:
        event = json.loads(data.decode().partition("data: ")[2])
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                open_index, arguments = event["index"], ""
                assert open_index == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    blocks[-1][fields[delta["type"]]] += delta[fields[delta["type"]]]
            case "content_block_stop":
                assert event["index"] == open_index
                if arguments:
                    blocks[-1]["input"] = from_json(arguments, allow_partial=True)
                open_index = None
    assert open_index is None
    return blocks


@given(events=event_lists())
def test_streamed_blocks_are_the_whole_ones(events: list[OutputEvent]) -> None:
    stream = ContentBlockStream()
    streamed = [data for event in events for data in stream.push(event)]
    streamed += stream.finish()
    assert accumulated(streamed) == content_blocks(joined_output(events))
