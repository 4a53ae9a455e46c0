"""Generated answers: their parts, and the events in which they are streamed."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.chat.fields import is_nested_too_deeply
from kvkeep.chat.messages import Message, ReasoningPart, TextPart, ToolCall


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class CallStarted:
    """A call begins. Its arguments follow, and then `CallEnded`, before any other event."""

    index: int  # of the call in the answer, from 0
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    delta: str  # of the arguments' JSON text


@dataclass(frozen=True)
class CallEnded:
    """A call's arguments end. complete: whether they are whole, and so a JSON object."""

    index: int
    complete: bool = True


OutputEvent = TextDelta | ReasoningDelta | CallStarted | CallArguments | CallEnded


@dataclass(frozen=True)
class GeneratedCall:
    id: str
    name: str
    arguments: str  # JSON of an object; its beginning if the call is not complete
    complete: bool = True  # false if the generation ended inside it

    def message_part(self) -> ToolCall:
        """Return the call in a conversation. Incomplete arguments are `{"": text}`."""
        return ToolCall(self.id, self.name, parse_arguments(self.arguments))


OutputPart = TextPart | ReasoningPart | GeneratedCall


@dataclass(frozen=True)
class Output:
    """An answer: its parts in the order in which the model wrote them."""

    parts: tuple[OutputPart, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> list[GeneratedCall]:
        return [part for part in self.parts if isinstance(part, GeneratedCall)]

    @property
    def calls_to_run(self) -> bool:
        """Whether there are calls, and all are complete: clients run them all or none."""
        return bool(self.calls) and all(call.complete for call in self.calls)

    def message(self) -> Message:
        """Return the answer as the assistant's message."""
        parts = (
            part.message_part() if isinstance(part, GeneratedCall) else part for part in self.parts
        )
        return Message("assistant", tuple(parts))


def joined_output(events: Iterable[OutputEvent]) -> Output:
    """Return the output whose streaming gave these events."""
    parts: list[OutputPart] = []
    for event in events:
        last = parts[-1] if parts else None
        if isinstance(event, TextDelta):
            text = last.text if isinstance(last, TextPart) else ""
            parts[len(parts) - isinstance(last, TextPart) :] = [TextPart(text + event.text)]
        elif isinstance(event, ReasoningDelta):
            text = last.text if isinstance(last, ReasoningPart) else ""
            parts[len(parts) - isinstance(last, ReasoningPart) :] = [
                ReasoningPart(text + event.text)
            ]
        elif isinstance(event, CallStarted):
            parts.append(GeneratedCall(event.id, event.name, "", complete=False))
        else:
            assert isinstance(last, GeneratedCall), "arguments outside of a call"
            if isinstance(event, CallEnded):
                parts[-1] = replace(last, complete=event.complete)
            else:
                parts[-1] = replace(last, arguments=last.arguments + event.delta)
    return Output(tuple(parts))


def parse_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; `{}` for blank text, `{"": text}` for what is no JSON object."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return {"": text}
    if value is None:
        return {}
    is_usable = isinstance(value, dict) and not is_nested_too_deeply(value)
    return value if is_usable else {"": text}


def _finite(number: str) -> float:
    """Read a number of JSON. Raises ValueError for one that only `Infinity` could stand for."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not finite")
    return value


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as JSON text, or the text that was not a JSON object."""
    text = call.arguments.get("")
    if isinstance(text, str) and parse_arguments(text) == call.arguments:
        return text
    return json.dumps(call.arguments, ensure_ascii=False)
