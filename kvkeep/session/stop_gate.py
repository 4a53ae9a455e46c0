"""Reasoning at the beginning of an answer, in which stop strings do not end it."""

from dataclasses import dataclass
from typing import Literal

from kvkeep.chat.output_format import OutputFormat

# "opening": where reasoning may begin. "space": behind it, before the answer's first character.
_Phase = Literal["opening", "reasoning", "space", "answer"]
_FINAL_CHANNEL = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers between which an answer begins with reasoning.

    is_open: whether it begins inside it, behind the first marker.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool = False

    @classmethod
    def of(cls, output_format: OutputFormat, is_open: bool) -> "ReasoningMarkers":
        """Return the markers of answers in a format."""
        starts = tuple(block.start for block in output_format.reasoning)
        if output_format.channels:
            return cls(starts, (_FINAL_CHANNEL,), is_open)
        openers = [form.opener for form in output_format.calls]
        ends = [block.end for block in output_format.reasoning]
        ends += [opener for opener in openers if opener in output_format.control_markers]
        return cls(starts, tuple(dict.fromkeys(ends)), is_open)


class StopGate:
    """Follows an answer, and says where its reasoning and the white space behind it end."""

    def __init__(self, markers: ReasoningMarkers):
        self._markers = markers
        self._phase: _Phase = "reasoning" if markers.is_open else "opening"
        self._seen = ""  # since the phase began, or the last of it
        self._kept = max(map(len, markers.ends), default=1) - 1

    def free_length(self, text: str, control: str = "") -> int:
        """Return how many first characters of the next text are no part of the answer.

        control: the text of a control token behind it; "" for none.
        """
        free = 0
        if self._phase == "opening":
            return len(text) if self._opens_reasoning(text + control) else 0
        if self._phase == "reasoning":
            free = self._follow_reasoning(text, control)
        if self._phase == "space":
            rest = text[free:].lstrip()
            free = len(text) - len(rest)
            if rest or (control and not self._seen):
                self._phase = "answer"
            self._seen = ""
        return free

    def _opens_reasoning(self, text: str) -> bool:
        """Follow the next text of the opening. Returns whether it ends where reasoning begins."""
        self._seen = (self._seen + text).lstrip()
        if self._seen.startswith(self._markers.starts):
            self._phase, self._seen = "reasoning", ""
            return True
        if self._seen and not any(s.startswith(self._seen) for s in self._markers.starts):
            self._phase = "answer"
        return False

    def _follow_reasoning(self, text: str, control: str) -> int:
        """Return how many first characters of a text are reasoning, or its end."""
        self._seen += text + control
        ends = [place + len(e) for e in self._markers.ends if (place := self._seen.find(e)) >= 0]
        if not ends:
            self._seen = self._seen[-self._kept :] if self._kept else ""
            return len(text)
        rest = len(self._seen) - min(ends)  # characters behind it, of the text and the control
        self._phase = "space"
        self._seen = control  # the marker itself, or of a call that follows at once
        return min(len(text), max(0, len(text) + len(control) - rest))
