"""The tokens of an answer's parts: which of them wrote its text, and which its reasoning."""

from collections import deque
from collections.abc import Sequence

from kvkeep.chat.output import OutputEvent, ReasoningDelta, TextDelta
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken

_CONTROL = "\ud800"  # stands for a control token; decoded text has no lone surrogates
_Range = tuple[int, int]
Attributed = tuple[OutputEvent, list[GeneratedToken]]


def text_tokens(parts: Sequence[Attributed]) -> list[GeneratedToken]:
    """Return the tokens of the text."""
    return [token for event, tokens in parts if isinstance(event, TextDelta) for token in tokens]


class AnswerTokens:
    """Reads a generation with a reader, and ties tokens to the text and reasoning that they wrote.

    Markers, calls, and white space that is left out have no tokens. A token of several parts is of
    the first; one without text, such as the first half of a character, is of the next token's.
    """

    def __init__(self, reader: OutputReader):
        self.reasoning_tokens = 0
        self._reader = reader
        self._text = ""  # that no event contains so far
        self._start = 0  # offset of this text in the answer
        self._groups = deque[tuple[_Range, list[GeneratedToken]]]()  # offsets in the answer
        self._without_text: list[GeneratedToken] = []

    def push(self, event: GeneratedToken | Finished) -> list[Attributed]:
        """Read the generation's next event. Returns what is now certain, with its tokens."""
        if isinstance(event, GeneratedToken):
            self._without_text.append(event)
            self._append(event.pieces)
            return self._attributed(self._reader.push(event.pieces))
        self._append([event.text])
        return self._attributed([*self._reader.push([event.text]), *self._reader.finish()])

    def _append(self, pieces: Sequence[str | int]) -> None:
        text = "".join(piece if isinstance(piece, str) else _CONTROL for piece in pieces)
        if text:
            start = self._start + len(self._text)
            self._groups.append(((start, start + len(text)), self._without_text))
            self._text += text
            self._without_text = []

    def _attributed(self, events: Sequence[OutputEvent]) -> list[Attributed]:
        if not events:
            return []
        read = self._text[: self._num_read()]
        spans = _find_spans(read, events)
        result = [(event, self._take(span)) for event, span in zip(events, spans, strict=True)]
        for event, tokens in result:
            self.reasoning_tokens += len(tokens) * isinstance(event, ReasoningDelta)
        last = spans[-1]
        self._forget(len(read) if last is None else last[1])
        return result

    def _num_read(self) -> int:
        """Return how many characters of the text the reader has read."""
        text, unread = self._text, self._reader.unread
        position = len(text) - len(unread)
        if _CONTROL not in text:
            return position
        position = len(text)
        for char in reversed(unread):
            position -= 1
            while text[position] == _CONTROL and not "\ud800" <= char <= "\udfff":
                position -= 1  # a control token that the reader drops
        return position

    def _take(self, span: _Range | None) -> list[GeneratedToken]:
        """Return the tokens of a span, which are of no later one, and drop those before it."""
        if span is None:
            return []
        start, end = (self._start + offset for offset in span)
        tokens = list[GeneratedToken]()
        while self._groups and self._groups[0][0][0] < end:
            (_, group_end), group = self._groups.popleft()
            tokens += group if group_end > start else ()
        return tokens

    def _forget(self, length: int) -> None:
        self._text = self._text[length:]
        self._start += length
        while self._groups and self._groups[0][0][1] <= self._start:
            self._groups.popleft()


def _find_spans(read: str, events: Sequence[OutputEvent]) -> list[_Range | None]:
    """Return where the text of each event is in what was read; None for parts of calls.

    Behind the last text there may be white space that waits, and before each anything that was
    left out: texts are looked for from the end, those before a call from the start.
    """
    spans: list[_Range | None] = [None] * len(events)
    end, call_follows = len(read), False
    for index in reversed(range(len(events))):
        event = events[index]
        if not isinstance(event, (TextDelta, ReasoningDelta)):
            call_follows = True
            continue
        text, find = event.text, read.find if call_follows else read.rfind
        place = find(text, 0, end)
        span = (place, place + len(text)) if place >= 0 else _scattered(read[:end], text)
        spans[index], end = span, span[0]
    return spans


def _scattered(read: str, text: str) -> _Range:
    """Return the last place of a text between whose characters others were left out."""
    start, end, missing = len(read), 0, len(text)
    for index in reversed(range(len(read))):
        if missing and read[index] == text[missing - 1]:
            start, end, missing = index, end or index + 1, missing - 1
    return start, max(start, end)
