"""Chat renderings split at the borders of message texts, and their token ids.

Renderings are *sealed*: each control token that the template wrote has a secret name in them, so
that text of a message cannot be encoded as a control token (see `ControlTokens`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.spans import TokenRange


def placeholder_for(*texts: str | None) -> str:
    """Return letters, which no template trims, that occur in none of the texts."""
    placeholder = "kvkeepanswer"
    while any(text and placeholder in text for text in texts):
        placeholder += "x"
    return placeholder


def split_at_text(rendered: str, with_placeholder: str, placeholder: str) -> tuple[str, str, str]:
    """Split a rendering into the parts before, of and after a message's text.

    The text is as the template writes it, which may strip it. If the template does not write it as
    one piece, all of `rendered` is the first part.

    with_placeholder: the same rendering with the placeholder instead of the text.
    """
    prefix, separator, suffix = with_placeholder.partition(placeholder)
    text_end = len(rendered) - len(suffix)
    is_consistent = separator and len(prefix) <= text_end
    if not is_consistent or not (rendered.startswith(prefix) and rendered.endswith(suffix)):
        return rendered, "", ""
    return prefix, rendered[len(prefix) : text_end], suffix


def encode_pieces(
    codec: "TextCodec", pieces: Sequence[str]
) -> "tuple[list[int], list[TokenRange]]":
    """Return the token ids of a sealed rendering in pieces, and the range of each piece.

    pieces: alternately of the template and of a message's text. The ids are those of the joined
    pieces, except that a text has the ids that it has alone: only so can its span be replaced
    without changing the template's tokens beside it.

    Example: "user\\n" and "\\n\\nHi" are the tokens "user", "\\n" and "\\n\\n", "Hi"; joined, they
    would be "user", "\\n\\n", "\\n", "Hi".

    At two kinds of border the tokenizer's own tokens stay, and a token across the border belongs to
    the piece after it. If the template ends with a space and the text does not begin with one,
    " Hi" is one token, as in training. And if the parts would not decode to the joined text:
    SentencePiece's dummy prefix puts a space before each text, also before a part.
    """
    parts = _group_pieces(codec, pieces)
    ids: list[int] = []
    ranges: list[TokenRange] = []
    for index, part in enumerate(parts):
        if part.has_message:
            part_ids = codec.encode_sealed(part.text)
        else:
            part_ids = _encode_in_context(
                codec, part, parts[index - 1 : index], parts[index + 1 : index + 2]
            )
        borders = [len(ids) + border for border in _borders(codec, part.pieces, part_ids)]
        ranges += pairwise(borders)
        ids += part_ids
    return ids, ranges


@dataclass
class _Part:
    """Neighbouring pieces that are encoded together.

    has_message: whether one of them is a message's text. starts_naturally: whether the part
    begins at a "natural" border; see `_border_kind`.
    """

    pieces: list[str]
    has_message: bool
    starts_naturally: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _group_pieces(codec: "TextCodec", pieces: Sequence[str]) -> list[_Part]:
    """Join neighbouring pieces that have no token border between them. The first is template."""
    parts = [_Part([pieces[0]], has_message=False)]
    for index, piece in enumerate(pieces[1:], 1):
        last, is_message = parts[-1], index % 2 == 1
        border = None
        if piece and last.text and (is_message or last.has_message):
            border = _border_kind(codec, last.text, piece, is_message)
        if border is None:
            last.pieces.append(piece)
            last.has_message |= is_message and bool(piece)
        else:
            parts.append(_Part([piece], is_message, border == "natural"))
    return parts


def _border_kind(
    codec: "TextCodec", left: str, right: str, right_is_message: bool
) -> Literal["natural", "forced"] | None:
    """Return the kind of token border between two neighbours, of which one is a message's text.

    "natural": the joined text has a border there, and the message the tokens that it has alone.
    "forced": only encoding them apart puts a border there. None: they must be encoded together.
    """
    left_ids, right_ids = codec.encode_sealed(left), codec.encode_sealed(right)
    joined = codec.encode_sealed(left + right)
    border = len(joined) - len(right_ids) if right_is_message else len(left_ids)
    if border >= 0:
        message, template = (right_ids, left_ids) if right_is_message else (left_ids, right_ids)
        in_message, in_template = joined[:border], joined[border:]
        if right_is_message:
            in_message, in_template = in_template, in_message
        if in_message == message and codec.decode(in_template) == codec.decode(template):
            return "natural"
    if right_is_message and left.endswith(" ") and not right[0].isspace():
        return None
    return "forced" if codec.decode(left_ids + right_ids) == codec.decode(joined) else None


def _encode_in_context(
    codec: "TextCodec", part: _Part, left_parts: Sequence[_Part], right_parts: Sequence[_Part]
) -> list[int]:
    """Return the ids that a template part has in one text with messages at natural borders."""
    left = "".join(neighbour.text for neighbour in left_parts if part.starts_naturally)
    right = "".join(neighbour.text for neighbour in right_parts if neighbour.starts_naturally)
    left_ids, right_ids = codec.encode_sealed(left), codec.encode_sealed(right)
    joined = codec.encode_sealed(left + part.text + right)
    start, end = len(left_ids), len(joined) - len(right_ids)
    if start <= end and joined[:start] == left_ids and joined[end:] == right_ids:
        return joined[start:end]
    return codec.encode_sealed(part.text)


def _borders(codec: "TextCodec", pieces: Sequence[str], ids: Sequence[int]) -> list[int]:
    """Return the index of each piece's first token in the ids of all pieces, and their count."""
    borders = [0]
    for count in range(1, len(pieces)):
        ids_before = codec.encode_sealed("".join(pieces[:count]))
        borders.append(max(borders[-1], common_prefix_length(ids, ids_before)))
    return [*borders, len(ids)]


def overlap_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the largest n for which the last n items of `left` are the first n of `right`."""
    lengths = range(min(len(left), len(right)), 0, -1)
    return next((n for n in lengths if left[-n:] == right[:n]), 0)


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many of the first ids are equal in both sequences.

    Without numpy, which help does not import; `token_diff.common_length` is for long arrays.
    """
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
