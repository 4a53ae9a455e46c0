"""The bytes in which a chat template writes a call, so that a grammar can ask for the same."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.chat.messages import Message, Tool, ToolCall
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.output_reader import OutputReader

_FORMS: Sequence[tuple[Literal["spaced", "compact"], str]] = (
    ("spaced", '{{"{key}": "{value}"}}'),
    ("compact", '{{"{key}":"{value}"}}'),
)


@dataclass(frozen=True)
class RenderedCall:
    """A call as a template writes it: the text around its name and its JSON arguments.

    after: the text behind the arguments, up to an id of nine characters, if there is one; end: what
    follows that. Texts of control tokens stand for these.
    """

    before: str
    between: str
    after: str
    separators: Literal["spaced", "compact"]
    end: str | None = None  # None without an id


def parse_rendered_call(
    text: str, call: ToolCall, output_format: OutputFormat
) -> RenderedCall | None:
    """Return the form of a call with one argument, a text; None for another form than JSON.

    text: the answer that the template writes for it. The form is one that the format's reader
    reads.
    """
    for markers in output_format.reasoning:  # an empty block
        start, end = re.escape(markers.start + markers.label), re.escape(markers.end)
        text = re.sub(rf"\A\s*{start}\s*{end}", "", text)
    text = text.strip()
    ((key, value),) = call.arguments.items()
    for separators, pattern in _FORMS:
        before, found, after = text.partition(pattern.format(key=key, value=value))
        if not found or before.count(call.name) != 1 or call.name in after or call.id in before:
            continue
        if not _is_read(text, call, output_format):
            return None
        after, has_id, end = after.partition(call.id)
        first, _, between = before.partition(call.name)
        return RenderedCall(first, between, after, separators, end if has_id else None)
    return None


def _is_read(text: str, call: ToolCall, output_format: OutputFormat) -> bool:
    """Whether the reader finds the call alone in an answer that must be one."""
    controls = sorted(output_format.control_markers)
    pattern = "|".join(map(re.escape, controls)) or "(?!)"
    parts = filter(None, re.split(f"({pattern})", text))
    reader = OutputReader(
        *(output_format, (Tool(call.name),), lambda: call.id),
        forced=True,
        control_text=controls.__getitem__,
    )
    reader.push([controls.index(part) if part in controls else part for part in parts])
    reader.finish()
    return reader.output.message() == Message("assistant", (call,))
