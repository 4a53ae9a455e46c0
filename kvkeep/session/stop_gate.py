"""Reasoning at the beginning of an answer, in which stop strings do not end it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvkeep.chat.channels import CHANNEL, MESSAGE_HEADER, REASONING_CHANNEL
from kvkeep.chat.output_format import OutputFormat

if TYPE_CHECKING:
    from kvkeep.chat.renderer import RenderedPrompt

# "opening": where reasoning may begin. "space": behind it, before the answer's first character.
_Phase = Literal["opening", "reasoning", "space", "answer"]
_MAX_HEADER = 1000  # characters; what is longer is text of the answer


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers between which an answer begins with reasoning, and where in it a text begins.

    channels: whether headers of messages are the markers, so that `ends` is empty. seen: the text
    since the phase began, or the last of it.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    channels: bool = False
    phase: _Phase = "opening"
    seen: str = ""

    @classmethod
    def of(cls, output_format: OutputFormat, is_open: bool) -> "ReasoningMarkers":
        """Return the markers of answers in a format.

        is_open: whether they begin inside the reasoning, behind its first marker.
        """
        phase: _Phase = "reasoning" if is_open else "opening"
        if output_format.channels:
            return cls((CHANNEL,), (), True, phase)
        starts = tuple(block.start for block in output_format.reasoning)
        openers = [form.opener for form in output_format.calls]
        ends = [block.end for block in output_format.reasoning]
        ends += [opener for opener in openers if opener in output_format.control_markers]
        return cls(starts, tuple(dict.fromkeys(ends)), False, phase)

    @classmethod
    def behind_prompt(
        cls, output_format: OutputFormat, prompt: "RenderedPrompt"
    ) -> "ReasoningMarkers | None":
        """Return the markers of a prompt's answer; None if it ends behind their beginning."""
        if prompt.continues and not prompt.starts_in_reasoning:
            return None
        return cls.of(output_format, prompt.starts_in_reasoning)


class StopGate:
    """Follows an answer, and says where its reasoning and the white space behind it end."""

    def __init__(self, markers: ReasoningMarkers):
        self._markers = markers
        self._phase, self._seen = markers.phase, markers.seen
        longest = max(map(len, markers.ends), default=1)
        self._kept = _MAX_HEADER if markers.channels else longest - 1

    @property
    def markers(self) -> ReasoningMarkers:
        """The markers for a text that goes on here."""
        return replace(self._markers, phase=self._phase, seen=self._seen)

    @property
    def in_answer(self) -> bool:
        """Whether all that follows is part of the answer."""
        return self._phase == "answer"

    def free_length(self, text: str, control: str = "") -> int:
        """Return how many first characters of the next text are no part of the answer.

        control: the text of a control token behind it; "" for none.
        """
        if self._phase == "answer":
            return 0
        rest = text + control
        if self._phase == "opening":
            rest = self._behind_opening(rest)
        if self._phase == "reasoning":
            rest = self._behind_reasoning(rest)
        if self._phase == "space":
            rest = rest.lstrip()
            if rest:
                self._phase = "answer"
        return min(len(text), len(text) + len(control) - len(rest))

    def _behind_opening(self, text: str) -> str:
        """Follow the next text of the opening. Returns what is behind the reasoning's beginning.

        That is all of the text where no marker is complete. A header that has begun is no part of
        the answer.
        """
        self._seen = (self._seen + text).lstrip()
        start = next(filter(self._seen.startswith, self._markers.starts), None)
        if start is None:
            if self._seen and not any(s.startswith(self._seen) for s in self._markers.starts):
                self._phase, self._seen = "answer", ""
            return text
        phase: _Phase = "reasoning"
        length = len(start)
        if self._markers.channels:
            header = MESSAGE_HEADER.match(self._seen)
            if header is None and len(self._seen) <= _MAX_HEADER:
                return ""
            if header is None or header[1] != REASONING_CHANNEL:
                phase = "answer"
            length = header.end() if header else len(self._seen)
        rest = self._seen[length:]
        self._phase, self._seen = phase, ""
        return rest

    def _behind_reasoning(self, text: str) -> str:
        """Follow the next text of the reasoning. Returns what is behind its end."""
        self._seen += text
        end = self._end_of_reasoning()
        if end is None:
            self._seen = self._seen[-self._kept :] if self._kept else ""
            return ""
        rest = self._seen[end:]
        self._phase, self._seen = "space", ""
        return rest

    def _end_of_reasoning(self) -> int | None:
        """Return where the first end of the reasoning ends in the text seen; None without one."""
        if self._markers.channels:
            headers = MESSAGE_HEADER.finditer(self._seen)
            return next((h.end() for h in headers if h[1] != REASONING_CHANNEL), None)
        places = [(self._seen.find(end), len(end)) for end in self._markers.ends]
        return min((place + length for place, length in places if place >= 0), default=None)
