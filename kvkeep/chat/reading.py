"""Reading an answer as it comes: the steps that all of its forms are read with.

A form is a generator. It yields an event of the output, or None to wait for more text. Since each
step depends only on the text before it, any division of the text into pieces gives the same output.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from kvkeep.chat.messages import NAMESPACE_SEPARATOR, Tool
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvkeep.chat.scanner import SPACE, Scanner

# An opening fence; behind its backticks are no others. A closing one has nothing behind it.
_FENCE = re.compile(r" {0,3}(?:(`{3,})(?![^`]*`)|(~{3,}))")
_FENCE_END = re.compile(r" {0,3}(`{3,}|~{3,})[ \t\r]*\Z")
_MAX_FENCE_LINE = 1000  # characters, the others are ignored
_CODE_INDENT = 4  # columns
_MODULES = re.compile(r"^(?:(?:default_api|functions|tools)\.)+")
T = TypeVar("T")
Steps = Generator[OutputEvent | None, None, T]


class NotACall(Exception):
    """The text is not a call of a known tool in this form, and so it is text."""


class CallObserver(Protocol):
    """An observer of the places where calls become certain, while they are read."""

    def name_begins(self, kind: str, text: str) -> None:
        """Note that what comes next must be a tool's name, or there is no call.

        kind: the syntax of what follows the name, such as "json". text: the unread text from the
        name on.
        """

    def arguments_begin(self, tool: Tool, text: str) -> None:
        """Note that the arguments of a call, a JSON object, come next. text: the unread text."""


class AnswerReading:
    """The unread text of an answer, and the state of its output."""

    observer: CallObserver | None = None

    def __init__(self, scanner: Scanner, tools: Sequence[Tool], new_call_id: Callable[[], str]):
        self.scanner = scanner
        self.tools = {tool.name: tool for tool in tools}
        self.call_count = 0
        self._new_call_id = new_call_id
        self.line = TextLine()  # of the answer's text
        self.names_tool = False  # what may begin a call has the name of a tool
        self._named_tool: Tool | None = None  # that was required last
        self._space = ""  # white space that is text only if text follows
        self._wrote_text = self._wrote_other = False
        self._ends_part = False  # with a call or a marker
        self._reasoning_space, self._reasoning_is_empty = "", True

    # Reading

    def more(self) -> Steps[bool]:
        """Wait for more text. Returns False if there will be none."""
        if self.scanner.closed:
            return False
        yield None
        return True

    def skip_space(self) -> Steps[str]:
        """Read white space; return the character after it, or "" at the end."""
        scanner = self.scanner
        while True:
            scanner.advance(len(scanner.rest) - len(scanner.rest.lstrip(SPACE)))
            if scanner.rest or not (yield from self.more()):
                return scanner.rest[:1]

    def comes_next(self, *markers: str) -> Steps[tuple[str, int] | None]:
        """Return the marker that comes next and its length; None if none of them does.

        A marker that begins another one, as `"` begins `\"\"\"`, must come after it in `markers`.
        """
        scanner = self.scanner
        forms = [(marker, form) for marker in markers for form in scanner.forms(marker)]
        while True:
            found, may_come = None, False
            for marker, form in forms:
                if scanner.rest.startswith(form):
                    found = marker, len(form)
                    break
                may_come |= form.startswith(scanner.rest)
            if not may_come or not (yield from self.more()):
                return found

    def char_behind(self, beginning: str) -> Steps[str]:
        """Return the first character but white space behind a text that comes next, or ""."""
        while True:
            behind = self.scanner.rest[len(beginning) :].lstrip(SPACE)
            if behind or not (yield from self.more()):
                return behind[:1]

    def take(self, *markers: str) -> Steps[str | None]:
        """Read one of the markers, if it comes next, and return it."""
        found = yield from self.comes_next(*markers)
        if found is None:
            return None
        self.scanner.advance(found[1])
        return found[0]

    def expect(self, *markers: str) -> Steps[str]:
        """Read one of the markers. Raises NotACall if none comes next."""
        marker = yield from self.take(*markers)
        if marker is None:
            raise NotACall
        return marker

    def take_match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the text that a pattern matches, once more text cannot make it longer."""
        scanner = self.scanner
        while True:
            match = pattern.match(scanner.rest)
            length = match.end() if match else 0
            if length < len(scanner.rest) or not (yield from self.more()):
                return scanner.advance(length)

    # Output

    def text(self, text: str) -> Iterator[OutputEvent]:
        """Yield text of the answer. White space at its end waits for what follows.

        It is dropped before a call or reasoning, and at the start of text after these.
        """
        text = self.line.add(self.scanner.plain(text))
        if not text.strip(SPACE):
            self._space += text
            return
        text = self._space + text
        visible = text.rstrip(SPACE)
        self._space = text[len(visible) :]
        if self._wrote_other and not self._wrote_text:
            visible = visible.lstrip(SPACE)
        self._wrote_text, self._ends_part = True, False
        yield TextDelta(visible)

    def written_text(self) -> Iterator[OutputEvent]:
        """Yield what was read since the mark as text."""
        text = self.scanner.written
        self.scanner.mark()
        yield from self.text(text)

    def rest_as_text(self) -> Steps[None]:
        """Read all that follows as text."""
        while True:
            self.scanner.mark()
            yield from self.text(self.scanner.advance(len(self.scanner.rest)))
            if not (yield from self.more()):
                return

    def finish_text(self) -> Iterator[OutputEvent]:
        """Yield white space at the end of the answer, unless it follows a call or reasoning."""
        if self._space and not self._ends_part and self._wrote_text >= self._wrote_other:
            yield TextDelta(self._space)
        self._space = ""

    def end_part(self) -> None:
        """Drop white space at the end of a text, and behind it if no other text follows."""
        self._space, self._ends_part = "", True

    def begin_reasoning(self) -> None:
        self._begin_other()
        self._reasoning_space, self._reasoning_is_empty = "", True

    def reasoning_text(self, text: str) -> Iterator[OutputEvent]:
        """Yield text of the reasoning, without white space at its start and end."""
        text = self.scanner.plain(text)
        if not text.strip(SPACE):
            self._reasoning_space += text
            return
        text = self._reasoning_space + text
        if self._reasoning_is_empty:
            text = text.lstrip(SPACE)
        visible = text.rstrip(SPACE)
        self._reasoning_space = text[len(visible) :]
        self._reasoning_is_empty = False
        yield ReasoningDelta(visible)

    def start_call(self, name: str, call_id: str = "") -> CallStarted:
        """Begin a call of a known tool, by any of its names. What was read is no text any more."""
        tool = self.require_tool(name)
        self._begin_other()
        self._ends_part = True
        self.scanner.mark()
        self.call_count += 1
        return CallStarted(self.call_count - 1, call_id or self._new_call_id(), tool.name)

    def arguments(self, text: str) -> CallArguments:
        """Return a part of a call's arguments. text: JSON, with control tokens only in strings."""
        return CallArguments(self.call_count - 1, self.scanner.plain(text, in_json=True))

    def end_call(self, complete: bool = True) -> CallEnded:
        self.scanner.mark()
        return CallEnded(self.call_count - 1, complete)

    def whole_call(self, name: str, arguments: str, call_id: str = "") -> Iterator[OutputEvent]:
        yield self.start_call(name, call_id)
        yield self.arguments(arguments)
        yield self.end_call()

    def require_tool(self, name: str) -> Tool:
        """Return a tool by a name as `tool_name` takes it. Raises NotACall for an unknown one."""
        full_name = tool_name(name, self.tools)
        if full_name is None:
            raise NotACall
        self.names_tool = True
        self._named_tool = self.tools[full_name]
        return self._named_tool

    def name_begins(self, kind: str, skipped: int = 0) -> None:
        """Notify the observer that the name of a call comes next, behind some characters."""
        if self.observer is not None:
            self.observer.name_begins(kind, self.scanner.rest[skipped:])

    def arguments_begin(self) -> None:
        """Notify the observer that the JSON arguments of the tool come next that was named last."""
        if self.observer is not None and self._named_tool is not None:
            self.observer.arguments_begin(self._named_tool, self.scanner.rest)

    def _begin_other(self) -> None:
        self._space, self._wrote_other = "", True


class TextLine:
    """The last line of a text in Markdown. is_blank: whether it has only white space so far."""

    def __init__(self) -> None:
        self.is_blank = True
        self._line = ""  # its beginning
        self._fence = ""  # that opened the block of code

    @property
    def in_code(self) -> bool:
        """Whether the line is in a block of code, by the fences before it or by its indentation."""
        indent = self._line[: len(self._line) - len(self._line.lstrip(" \t"))]
        return bool(self._fence) or len(indent.expandtabs(_CODE_INDENT)) >= _CODE_INDENT

    def add(self, text: str) -> str:
        """Append a text, and return it."""
        line, *lines = text.split("\n")
        self._append(line)
        for line in lines:
            self._end_line()
            self._append(line)
        return text

    def _append(self, text: str) -> None:
        self.is_blank = self.is_blank and not text.strip(SPACE)
        self._line += text[: _MAX_FENCE_LINE - len(self._line)]

    def _end_line(self) -> None:
        if not self._fence:
            opening = _FENCE.match(self._line)
            self._fence = (opening[1] or opening[2]) if opening else ""
        elif (end := _FENCE_END.match(self._line)) and end[1].startswith(self._fence):
            self._fence = ""
        self.is_blank, self._line = True, ""


def tool_name(written: str, names: Collection[str]) -> str | None:
    """Return which of the names a model means; None if it is none of them, or not certain.

    Models write modules before names, and points between a namespace and a name, or leave out the
    namespace: `functions.find`, `crm.find` and `find` all mean `crm__find`, unless another of the
    names is `find`, or there are others that end with `__find`.
    """
    if written in names:
        return written
    written = _MODULES.sub("", written)
    joined = written.replace(".", NAMESPACE_SEPARATOR)
    for name in (written, joined):
        if name in names:
            return name
    ends = [name for name in names if joined and name.endswith(NAMESPACE_SEPARATOR + joined)]
    return ends[0] if len(ends) == 1 else None


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Return events with neighbouring deltas of one kind joined."""
    result: list[OutputEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(event.index, last.delta + event.delta)
        else:
            result.append(event)
    return result
