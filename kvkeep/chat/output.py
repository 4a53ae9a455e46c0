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


class OutputBuilder:
    """The parts of an answer so far, built from its events.

    The texts of a part are joined when they are read: each step would copy the text before it.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[OutputPart, list[str]]] = []  # a part without text, and its texts

    def push(self, events: Iterable[OutputEvent]) -> None:
        """Append the next events."""
        for event in events:
            last, texts = self._parts[-1] if self._parts else (None, list[str]())
            if isinstance(event, TextDelta):
                texts = texts if isinstance(last, TextPart) else self._open(TextPart(""))
                texts.append(event.text)
            elif isinstance(event, ReasoningDelta):
                texts = texts if isinstance(last, ReasoningPart) else self._open(ReasoningPart(""))
                texts.append(event.text)
            elif isinstance(event, CallStarted):
                self._open(GeneratedCall(event.id, event.name, "", complete=False))
            else:
                assert isinstance(last, GeneratedCall), "arguments outside of a call"
                if isinstance(event, CallEnded):
                    self._parts[-1] = replace(last, complete=event.complete), texts
                else:
                    texts.append(event.delta)

    @property
    def output(self) -> Output:
        """The answer so far."""
        return Output(tuple(_with_text(part, "".join(texts)) for part, texts in self._parts))

    def _open(self, part: OutputPart) -> list[str]:
        """Begin a part. Returns the list of its texts."""
        self._parts.append((part, []))
        return self._parts[-1][1]


def _with_text(part: OutputPart, text: str) -> OutputPart:
    if isinstance(part, GeneratedCall):
        return replace(part, arguments=text)
    return replace(part, text=text)


def joined_output(events: Iterable[OutputEvent]) -> Output:
    """Return the output whose streaming gave these events."""
    builder = OutputBuilder()
    builder.push(events)
    return builder.output


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
