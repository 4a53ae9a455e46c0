"""The formats in which models write answers: their reasoning, their calls, and their detection."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvkeep.chat.call_syntax import TAGGED, CallForm
from kvkeep.errors import InvalidArgument


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers around the reasoning."""

    start: str
    end: str


@dataclass(frozen=True)
class OutputFormat:
    """A format of answers.

    bare_json: whether a JSON object that is the whole answer may be a call. control_markers: those
    that are control tokens of the vocabulary; their text is no marker.
    """

    name: str
    reasoning: tuple[ReasoningMarkers, ...] = (ReasoningMarkers("<think>", "</think>"),)
    calls: tuple[CallForm, ...] = ()
    bare_json: bool = False
    control_markers: frozenset[str] = frozenset()

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, each once."""
        result = [text for markers in self.reasoning for text in (markers.start, markers.end)]
        for form in self.calls:
            result += [form.opener, *form.markers]
        return tuple(dict.fromkeys(result))


FORMATS = {
    form.name: form
    for form in (
        OutputFormat("plain"),
        OutputFormat("hermes", calls=(TAGGED,)),
    )
}


def format_by_name(name: str, control_texts: Collection[str] = ()) -> OutputFormat:
    """Return a format. Raises InvalidArgument for an unknown name."""
    if name not in FORMATS:
        raise InvalidArgument(f"output format {name!r} is unknown; known: {', '.join(FORMATS)}")
    markers = FORMATS[name].markers
    return replace(FORMATS[name], control_markers=frozenset(markers) & frozenset(control_texts))


def detect_format(template_source: str, control_texts: Collection[str]) -> OutputFormat:
    """Return the format of the answers of a model.

    template_source: of its chat template, "" without one. control_texts: the texts of its special
    tokens. Models whose template knows no tools are told to call them in Hermes' form.
    """
    return format_by_name("hermes", control_texts)
