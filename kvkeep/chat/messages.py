"""The normal form of a conversation, which every API is translated to and from.

In normal form a message has one of four roles; neighbours have different roles, and a message has
no two text parts in a row. Tool results are messages of role "tool", tied to their call by its id.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
NAMESPACE_SEPARATOR = "__"  # in the names by which the model knows the tools of a namespace
_BETWEEN_MESSAGES = "\n\n"  # between the texts of merged messages


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class MediaPart:
    """Content that no text model takes, such as an image. It is rendered as a placeholder."""

    kind: str  # "image", "audio", "video" or "file"
    name: str = ""  # of the file, if the client states it

    @property
    def placeholder(self) -> str:
        return f"[{self.kind} {self.name} omitted]" if self.name else f"[{self.kind} omitted]"


@dataclass(frozen=True)
class ReasoningPart:
    """The model's reasoning, which comes before its answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made."""

    id: str
    name: str
    # `{"input": text}` of a custom tool. Text that is not a JSON object is `{"": text}`.
    arguments: Mapping[str, Any]
    kind: Literal["function", "custom"] = "function"
    namespace: str = ""  # of the tool, in the Responses API

    def __hash__(self) -> int:
        return hash((self.id, self.name))


@dataclass(frozen=True)
class ToolResult:
    """The result of the call with this id."""

    call_id: str
    content: tuple[TextPart | MediaPart, ...] = ()
    is_error: bool = False
    kind: Literal["function", "custom"] = "function"  # of the call


Place = tuple[int, int]  # the index of a message, and of a call or a result in it
Part = TextPart | MediaPart | ReasoningPart | ToolCall | ToolResult


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The texts, with placeholders for other content; without reasoning and calls."""
        return content_text(part for part in self.parts if isinstance(part, (TextPart, MediaPart)))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def results(self) -> list[ToolResult]:
        return [part for part in self.parts if isinstance(part, ToolResult)]


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call.

    A custom tool takes text: the model sees a function with one parameter, "input". strict: whether
    the arguments of its calls must follow `parameters`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    kind: Literal["function", "custom"] = "function"
    namespace: str = ""
    # Described in the conversation, where it refers to the tool, and not before it.
    deferred: bool = False
    strict: bool = field(default=False, compare=False)  # changes no prompt

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the model may call, and whether it must call one.

    mode: "auto" for any or none, "none", or "required" for at least one. names: the allowed tools,
    None for all of them.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation, and the tools that the model may call in its answer.

    The prompt describes all tools, whatever the choice is, so that another one changes no prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that `choice` allows. Of several of one name it is the last."""
        if self.choice.mode == "none":
            return ()
        by_name, names = {tool.name: tool for tool in self.tools}, self.choice.names
        return tuple(tool for tool in by_name.values() if names is None or tool.name in names)


def content_text(content: Iterable[TextPart | MediaPart]) -> str:
    """Return the joined texts, with placeholders for other content."""
    return "".join(
        part.text if isinstance(part, TextPart) else part.placeholder for part in content
    )


def media_warnings(messages: Iterable[Message]) -> list[str]:
    """Return a warning if messages have content other than text."""
    contents = [
        part.content if isinstance(part, ToolResult) else (part,)
        for message in messages
        for part in message.parts
    ]
    parts = [part for content in contents for part in content if isinstance(part, MediaPart)]
    kinds = ", ".join(sorted({part.kind for part in parts}))
    return [f"messages: placeholders stand for content of type {kinds}"] if kinds else []


def call_places(messages: Sequence[Message]) -> dict[Place, Place]:
    """Return the place of the call of each result, by the result's place.

    Ids may repeat: results are of the newest calls with their id, in order. One more than there are
    calls is another result of the last.
    """
    open_calls: dict[str, list[Place]] = {}  # by id; the last one stays
    result = {}
    for number, message in enumerate(messages):
        new_calls = defaultdict[str, list[Place]](list)
        for index, call in enumerate(message.calls):
            new_calls[call.id].append((number, index))
        open_calls |= new_calls
        for index, part in enumerate(message.results):
            if places := open_calls.get(part.call_id):
                result[number, index] = places.pop(0) if len(places) > 1 else places[0]
    return result


def normalized(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages in normal form: neighbours of one role merged, neighbouring texts joined.

    Texts of one message are joined as they are, and those of merged messages by an empty line.
    Empty texts are dropped; a message without any content stays, as a turn of its own.
    """
    runs = list[tuple[Role, list[Part]]]()
    for message in messages:
        parts = _joined(message.parts)
        if not runs or runs[-1][0] != message.role:
            runs.append((message.role, []))
        run = runs[-1][1]
        if run and parts and _is_text(run[-1]) and _is_text(parts[0]):
            run.append(TextPart(_BETWEEN_MESSAGES))
        run += parts
    return tuple(Message(role, _joined(run)) for role, run in runs)


def _is_text(part: Part) -> bool:
    return isinstance(part, (TextPart, MediaPart))


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts with neighbouring texts joined, and without empty texts and reasoning."""
    result = list[Part]()
    filled = (part for part in parts if getattr(part, "text", None) != "")
    for kind, run in groupby(filled, type):
        if kind in (TextPart, ReasoningPart):
            result.append(kind("".join(part.text for part in run)))  # type: ignore[union-attr]
        else:
            result += run
    return tuple(result)
