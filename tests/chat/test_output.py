"""Outputs joined from the events of an answer."""

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.messages import ReasoningPart, TextPart
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    GeneratedCall,
    Output,
    OutputBuilder,
    OutputEvent,
    OutputPart,
    ReasoningDelta,
    TextDelta,
    joined_output,
)


class AddedText(str):
    """A text that counts how often it is appended to another one."""

    count: ClassVar[int] = 0

    def __radd__(self, other: str) -> str:
        AddedText.count += 1
        return str(other) + str(self)


@st.composite
def event_lists(draw: st.DrawFn) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    kinds = st.sampled_from([TextDelta, ReasoningDelta, CallStarted])
    for index, kind in enumerate(draw(st.lists(kinds, max_size=6))):
        if kind is not CallStarted:
            events.append(kind(draw(st.text(max_size=3))))
            continue
        events.append(CallStarted(index, f"id_{index}", "f"))
        events += [CallArguments(index, text) for text in draw(st.lists(st.text(max_size=3)))]
        if draw(st.booleans()):
            events.append(CallEnded(index, draw(st.booleans())))
    return events


def stepwise_output(events: list[OutputEvent]) -> Output:
    """Return the output of events, each appended to the part before it."""
    parts: list[OutputPart] = []
    for event in events:
        last = parts.pop() if parts else None
        match event, last:
            case TextDelta(text), TextPart(before):
                parts.append(TextPart(before + text))
            case ReasoningDelta(text), ReasoningPart(before):
                parts.append(ReasoningPart(before + text))
            case CallArguments(_, text), GeneratedCall(id, name, before, complete):
                parts.append(GeneratedCall(id, name, before + text, complete))
            case CallEnded(_, complete), GeneratedCall(id, name, before):
                parts.append(GeneratedCall(id, name, before, complete))
            case _:
                parts += [last] if last is not None else []
                if isinstance(event, TextDelta):
                    parts.append(TextPart(event.text))
                elif isinstance(event, ReasoningDelta):
                    parts.append(ReasoningPart(event.text))
                else:
                    assert isinstance(event, CallStarted)
                    parts.append(GeneratedCall(event.id, event.name, "", complete=False))
    return Output(tuple(parts))


@given(events=event_lists())
def test_events_are_joined_to_parts(events: list[OutputEvent]) -> None:
    assert joined_output(events) == stepwise_output(events)
    builder = OutputBuilder()
    for number, event in enumerate(events, 1):
        builder.push([event])
        assert builder.output == stepwise_output(events[:number])


def test_joining_does_not_copy_the_text_so_far_with_each_event() -> None:
    events: list[OutputEvent] = [
        *(TextDelta(AddedText("a")) for _ in range(100)),
        *(ReasoningDelta(AddedText("b")) for _ in range(100)),
        CallStarted(0, "id", "f"),
        *(CallArguments(0, AddedText("c")) for _ in range(100)),
        CallEnded(0),
    ]
    output = joined_output(events)
    assert (output.text, output.reasoning) == ("a" * 100, "b" * 100)
    assert output.calls == [GeneratedCall("id", "f", "c" * 100)]
    assert AddedText.count == 0
