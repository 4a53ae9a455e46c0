"""Answers as one text for people, with the reasoning as a quotation in Markdown."""

from collections.abc import Iterable

from kvkeep.chat.output import OutputEvent, ReasoningDelta, TextDelta

_QUOTATION = "> "


class QuotedReasoning:
    """Text of an answer's events: each line of its reasoning begins with "> ", as in Markdown.

    A blank line separates reasoning and text. Calls are left out. The text does not depend on how
    the answer is divided into events.
    """

    def __init__(self) -> None:
        self._in_reasoning = self._has_text = False
        self._held = ""  # line ends, which are written only if more of the same kind follows

    def push(self, events: Iterable[OutputEvent]) -> str:
        """Return the text of more events."""
        deltas = (event for event in events if isinstance(event, (TextDelta, ReasoningDelta)))
        return "".join(self._text(delta) for delta in deltas)

    def _text(self, delta: TextDelta | ReasoningDelta) -> str:
        is_reasoning, text = isinstance(delta, ReasoningDelta), delta.text
        if is_reasoning is not self._in_reasoning or not self._has_text:
            text = text.lstrip("\n") if is_reasoning or self._in_reasoning else text
            if not text:
                return ""
            separator = "\n\n" if self._has_text else ""
            begin = separator + (_QUOTATION if is_reasoning else "")
            self._in_reasoning, self._has_text, self._held = is_reasoning, True, ""
        else:
            begin = ""
        if not is_reasoning:
            return begin + text
        text = self._held + text
        written = text.rstrip("\n")
        self._held = text[len(written) :]
        return begin + written.replace("\n", f"\n{_QUOTATION}")
