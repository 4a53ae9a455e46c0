"""The names of spans by which compaction knows tool results, reasoning and the other messages.

`Conversation` names the parts of its turns so. In a session of your own, name them with
`Session.span`: "tool result 4", "reasoning 4", "user 4".
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvkeep.chat.renderer import ChatRenderer
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.spans import TokenRange

SpanKind = Literal["result", "reasoning", "user"]
_PATTERNS: dict[SpanKind, re.Pattern[str]] = {
    "result": re.compile(r"turn \d+ result( \d+)?|tool result.*", re.DOTALL),
    "reasoning": re.compile(r"turn \d+ reasoning( \d+)?|reasoning.*", re.DOTALL),
    "user": re.compile(r"turn \d+ question|user.*", re.DOTALL),
}
_TURN = re.compile(r"turn \d+")
_SYSTEM_NAMES = ("system", "opening")  # with the template's text around it


def spans_of_kind(spans: "Mapping[str, TokenRange]", kind: SpanKind) -> list[str]:
    """Return the names of all spans of a kind, in the order of the text."""
    pattern = _PATTERNS[kind]
    return sorted(filter(pattern.fullmatch, spans), key=lambda name: spans[name])


def system_end(spans: "Mapping[str, TokenRange]") -> int:
    """Return the end of the system prompt, at the beginning of the text; 0 if there is none."""
    return max((spans[name][1] for name in _SYSTEM_NAMES if name in spans), default=0)


def newest_turn_start(spans: "Mapping[str, TokenRange]", count: int) -> int:
    """Return where the newest `count` turns begin; beyond any text if that is 0.

    Where no span is a turn, a user's message begins one. A text without any is one turn.
    """
    if not count:
        return 2**62
    starts = sorted(spans[name][0] for name in spans if _TURN.fullmatch(name))
    starts = starts or [spans[name][0] for name in spans_of_kind(spans, "user")]
    return starts[-count:][0] if starts else 0


def reasoning_range(
    codec: "TextCodec", renderer: "ChatRenderer", ids: Sequence[int]
) -> "TokenRange | None":
    """Return which of an answer's tokens are its reasoning, without the markers around it.

    None if there is none, or if it is in several places.
    """
    from kvkeep.session.streaming import TextStream  # imports the tokenizers

    output_format = renderer.output_format
    ends_reasoning = (block.end in codec.decode(ids) for block in output_format.reasoning)
    if not output_format.channels and not any(ends_reasoning):
        return None
    reader, stream = renderer.new_reader(), TextStream(codec, ())
    pieces = [stream.push_pieces(token) for token in ids]
    texts = ["".join(piece for piece in part if isinstance(piece, str)) for part in pieces]
    text, ends = "".join(texts), list(accumulate(map(len, texts)))  # of each token's text
    reader.push(list(chain.from_iterable(pieces)))  # at once: each call takes time of its own
    reader.finish()
    reasoning = reader.output.reasoning.strip()
    start = text.find(reasoning) if reasoning else -1
    if start < 0:
        return None
    starts = [0, *ends[:-1]]
    inside = [
        index
        for index, (first, last) in enumerate(zip(starts, ends, strict=True))
        if first >= start and last <= start + len(reasoning) and first < last
    ]
    return (inside[0], inside[-1] + 1) if inside else None
