"""The description of a format of answers: its markers, its calls, and what shows it."""

from dataclasses import dataclass

from kvkeep.chat.call_form import BareForm, CallForm, CallText
from kvkeep.chat.channels import CHANNEL_MARKERS


@dataclass(frozen=True)
class BlockMarkers:
    """The markers around a part of the answer, and a label behind the first one.

    has_lines: whether white space at both ends, inside the markers, is no text. That of reasoning
    never is.
    """

    start: str
    end: str
    label: str = ""
    has_lines: bool = False


THINK = BlockMarkers("<think>", "</think>")


@dataclass(frozen=True)
class OutputFormat:
    """A format of answers.

    signs: groups of texts; a chat template that has all texts of a group is of this format.
    control_signs: the same of control tokens in a vocabulary, if the template shows no format.
    reasoning: the markers around it; the first ones are those that the model writes.
    wrappers: markers around the text, which are left out.
    bare_json: whether a JSON object that is the whole answer may be a call.
    bare_calls: forms of calls without a marker, which begin an answer.
    channels: whether the answer is messages in channels.
    control_markers: the markers that are control tokens, so that their text is no marker.
    call_text: the form of calls in the history, if chat templates of these models know none.
    is_assumed: whether neither template nor vocabulary shows a form of calls.
    """

    name: str
    signs: tuple[tuple[str, ...], ...] = ()
    control_signs: tuple[tuple[str, ...], ...] = ()
    reasoning: tuple[BlockMarkers, ...] = (THINK,)
    calls: tuple[CallForm, ...] = ()
    wrappers: tuple[BlockMarkers, ...] = ()
    bare_json: bool = False
    bare_calls: tuple[BareForm, ...] = ()
    channels: bool = False
    control_markers: frozenset[str] = frozenset()
    call_text: CallText | None = None
    is_assumed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, each once."""
        if self.channels:
            return CHANNEL_MARKERS
        result = list(self.silent_markers)
        for form in self.calls:
            result += [form.opener, *form.markers]
        return tuple(dict.fromkeys(result))

    @property
    def silent_markers(self) -> tuple[str, ...]:
        """Markers that are never part of the text, if they are control tokens."""
        if self.channels:
            return ()
        pairs = (*self.reasoning, *self.wrappers)
        return tuple(text for pair in pairs for text in (pair.start, pair.end))
