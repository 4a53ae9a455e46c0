"""A chat rendering cut where the texts of its messages begin and end, and its token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.spans import TokenRange


def mark_for(*texts: str | None) -> str:
    """A text that stands for a message's in a rendering, and is in none of these.

    Of letters only, so that no template trims it.
    """
    mark = "kvkeepanswer"
    while any(text and mark in text for text in texts):
        mark += "x"
    return mark


def cut(whole: str, marked: str, mark: str) -> tuple[str, str, str]:
    """What of a rendering comes before a message's text, the text as the template writes it (which
    may strip it), and what comes after.

    whole, marked: sealed renderings with the text, and with the mark in its place. All of `whole`
    is the first part where the template does not write the text as one piece.
    """
    before, found, after = marked.partition(mark)
    length = len(whole) - len(before) - len(after)
    if not found or length < 0 or not (whole.startswith(before) and whole.endswith(after)):
        return whole, "", ""
    return before, whole[len(before) : len(before) + length], after


def encode_pieces(
    codec: "TextCodec", pieces: Sequence[str]
) -> "tuple[list[int], list[TokenRange]]":
    """Token ids of a sealed rendering in pieces, and which of them each piece is.

    pieces: in turns what the template writes and the text of a message. The ids are those of the
    whole, but that those of a text are its own, as if it were encoded alone: a span of other ones
    could not be replaced without changing what the template writes beside it.

    Example: "user\\n" and "\\n\\nHi" are the tokens "user", "\\n" and "\\n\\n", "Hi"; the whole
    would be "user", "\\n\\n", "\\n", "Hi".

    Two kinds of border stay as the tokenizer has them, and a token across one belongs to what comes
    after it. Where the template ends with a space and the text does not begin with one, " Hi" is
    one token, as the model was trained to read it. And where the parts would not decode to the
    whole: SentencePiece's dummy prefix puts a space before each text, also before a part.
    """
    parts = _parts(codec, pieces)
    ids: list[int] = []
    places: list[TokenRange] = []
    for index, part in enumerate(parts):
        if part.fixed:
            found = codec.encode_sealed(part.text)
        else:
            found = _in_context(codec, part, parts[index - 1 : index], parts[index + 1 : index + 2])
        borders = [len(ids) + border for border in _borders(codec, part.pieces, found)]
        places += pairwise(borders)
        ids += found
    return ids, places


@dataclass
class _Part:
    """Neighbouring pieces that are encoded together.

    fixed: there is a text in it. joins: the whole has a border between tokens where it begins, and
    the tokens of a text beside that are the same as if it were alone.
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
    """How two neighbours part: by a border of the whole's, by one that is made, or not at all."""
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


def _in_context(
    codec: "TextCodec", part: _Part, before: Sequence[_Part], after: Sequence[_Part]
) -> list[int]:
    """Token ids of what the template writes, as they are beside the texts that it joins."""
    left = "".join(each.text for each in before if part.joins)
    right = "".join(each.text for each in after if each.joins)
    first, last = codec.encode_sealed(left), codec.encode_sealed(right)
    whole = codec.encode_sealed(left + part.text + right)
    end = len(whole) - len(last)
    if whole[: len(first)] == first and len(first) <= end and whole[end:] == last:
        return whole[len(first) : end]
    return codec.encode_sealed(part.text)


def _borders(codec: "TextCodec", pieces: Sequence[str], ids: Sequence[int]) -> list[int]:
    """Where each of the pieces begins in the ids of all of them, and where the last one ends."""
    borders = [0]
    for count in range(1, len(pieces)):
        before = codec.encode_sealed("".join(pieces[:count]))
        borders.append(max(borders[-1], common(ids, before)))
    return [*borders, len(ids)]


def common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first are the same."""
    pairs = zip(ids, others, strict=False)
    return next(
        (n for n, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others))
    )
