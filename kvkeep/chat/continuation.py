"""Reading of an answer that goes on: what follows its beginning, in the right part."""

from collections.abc import Callable, Sequence

from kvkeep.chat.output import Output, OutputBuilder, OutputEvent, ReasoningDelta, TextDelta
from kvkeep.chat.output_reader import OutputReader


class ContinuedReader:
    """Reads the rest of an answer: its events and its `output` are those of the rest alone.

    Example: of the beginning "<think>Is it" and the rest " so?</think>Yes." the reasoning is " so?"
    and the text is "Yes.".

    new_reader: returns a reader for a whole answer. beginning: pieces, as of `OutputReader.push`.
    """

    def __init__(
        self, new_reader: Callable[[], OutputReader], beginning: Sequence[str | int] = ()
    ) -> None:
        self._reader, self._builder = new_reader(), OutputBuilder()
        # What the reader holds back at the end of the beginning: it may begin a marker. It was
        # returned when the beginning ended there.
        self._returned: list[OutputEvent] = []
        if beginning:
            self._reader.push(beginning)
            ended_reader = new_reader()
            ended_reader.push(beginning)
            self._returned = ended_reader.finish()

    def push(self, pieces: Sequence[str | int]) -> list[OutputEvent]:
        """Append pieces of the rest. Returns what is now certain."""
        return self._add(self._reader.push(pieces))

    def finish(self) -> list[OutputEvent]:
        """Return the events of what was held back, at the end of the answer."""
        return self._add(self._reader.finish())

    @property
    def output(self) -> Output:
        """The rest of the answer so far."""
        return self._builder.output

    def _add(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if events and self._returned:
            first, *others = events
            events = [*_without_beginning(first, self._returned[-1]), *others]
            self._returned.clear()
        self._builder.push(events)
        return events


def _without_beginning(event: OutputEvent, returned: OutputEvent) -> list[OutputEvent]:
    """Return an event without the text of an earlier one, if that is of the same part."""
    for delta_type in (TextDelta, ReasoningDelta):
        if isinstance(event, delta_type) and isinstance(returned, delta_type):
            rest = event.text.removeprefix(returned.text)
            return [delta_type(rest)] if rest else []
    return [event]
