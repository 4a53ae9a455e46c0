"""Chat renderings split at the borders of message texts, and their token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.spans import TokenRange


def mark_for(*texts: str | None) -> str:
    """Return a placeholder for a message's text that occurs in none of the texts.

    It consists of letters, so that no template trims it.
    """
    mark = "kvkeepanswer"
    while any(text and mark in text for text in texts):
        mark += "x"
    return mark


def cut(whole: str, marked: str, mark: str) -> tuple[str, str, str]:
    """Split a rendering into the parts before, of and after a message's text.

    The text is as the template writes it, which may strip it. If the template does not write it as
    one piece, all of `whole` is the first part.

    whole, marked: sealed renderings with the text, and with the mark in its place.
    """
    before, separator, after = marked.partition(mark)
    length = len(whole) - len(before) - len(after)
    if not separator or length < 0 or not (whole.startswith(before) and whole.endswith(after)):
        return whole, "", ""
    return before, whole[len(before) : len(before) + length], after


def encode_pieces(
    codec: "TextCodec", pieces: Sequence[str]
) -> "tuple[list[int], list[TokenRange]]":
    """Return the token ids of a sealed rendering in pieces, and the range of each piece.

    pieces: alternately of the template and of a message's text. The ids are those of the whole,
    except that a text has the ids that it has alone: only so can its span be replaced without
    changing the template's tokens beside it.

    Example: "user\\n" and "\\n\\nHi" are the tokens "user", "\\n" and "\\n\\n", "Hi"; the whole
    would be "user", "\\n\\n", "\\n", "Hi".

    At two kinds of border the tokenizer's own tokens stay, and a token across the border belongs to
    the piece after it. If the template ends with a space and the text does not begin with one,
    " Hi" is one token, as in training. And if the parts would not decode to the whole:
    SentencePiece's dummy prefix puts a space before each text, also before a part.
    """
    parts = _parts(codec, pieces)
    ids: list[int] = []
    places: list[TokenRange] = []
    for index, part in enumerate(parts):
        if part.fixed:
            part_ids = codec.encode_sealed(part.text)
        else:
            part_ids = _encode_in_context(
                codec, part, parts[index - 1 : index], parts[index + 1 : index + 2]
            )
        borders = [len(ids) + border for border in _borders(codec, part.pieces, part_ids)]
        places += pairwise(borders)
        ids += part_ids
    return ids, places


@dataclass
class _Part:
    """Neighbouring pieces that are encoded together.

    fixed: whether one of them is a message's text. joins: whether the whole has a token border
    where the part begins, and the text beside it has the same tokens as alone.
    """

    pieces: list[str]
    fixed: bool
    joins: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _parts(codec: "TextCodec", pieces: Sequence[str]) -> list[_Part]:
    parts = [_Part([pieces[0]], fixed=False)]
    for index, piece in enumerate(pieces[1:], 1):
        last, begins_text = parts[-1], index % 2 == 1
        if not piece or not last.text or not (begins_text or last.fixed):
            border = "none"
        else:
            border = _border(codec, last.text, piece, begins_text)
        if border == "none":
            last.pieces.append(piece)
            last.fixed |= begins_text and bool(piece)
        else:
            parts.append(_Part([piece], begins_text, border == "own"))
    return parts


def _border(
    codec: "TextCodec", left: str, right: str, begins_text: bool
) -> Literal["own", "made", "none"]:
    """The border between two neighbours.

    "own": the whole has a token border there, and the text the tokens that it has alone. "made":
    encoding them apart puts a border there. "none": they must be encoded together.
    """
    before, after = codec.encode_sealed(left), codec.encode_sealed(right)
    whole = codec.encode_sealed(left + right)
    at = len(whole) - len(after) if begins_text else len(before)
    rest, other = (whole[:at], before) if begins_text else (whole[at:], after)
    text, alone = (whole[at:], after) if begins_text else (whole[:at], before)
    if at >= 0 and text == alone and codec.decode(rest) == codec.decode(other):
        return "own"
    if begins_text and left.endswith(" ") and not right[0].isspace():
        return "none"
    return "made" if codec.decode(before + after) == codec.decode(whole) else "none"


def _encode_in_context(
    codec: "TextCodec", part: _Part, before: Sequence[_Part], after: Sequence[_Part]
) -> list[int]:
    """Return the token ids of a template part as they are beside the texts that it joins."""
    left = "".join(neighbour.text for neighbour in before if part.joins)
    right = "".join(neighbour.text for neighbour in after if neighbour.joins)
    first, last = codec.encode_sealed(left), codec.encode_sealed(right)
    whole = codec.encode_sealed(left + part.text + right)
    end = len(whole) - len(last)
    if whole[: len(first)] == first and len(first) <= end and whole[end:] == last:
        return whole[len(first) : end]
    return codec.encode_sealed(part.text)


def _borders(codec: "TextCodec", pieces: Sequence[str], ids: Sequence[int]) -> list[int]:
    """The index of each piece's first token in the ids of all pieces, and the count of ids."""
    borders = [0]
    for count in range(1, len(pieces)):
        before = codec.encode_sealed("".join(pieces[:count]))
        borders.append(max(borders[-1], common(ids, before)))
    return [*borders, len(ids)]


def common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(ids, others, strict=False)
    return next(
        (n for n, (left, right) in enumerate(pairs) if left != right), min(len(ids), len(others))
    )
