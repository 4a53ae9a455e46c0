"""Streaming detokenization: whole characters, ending before a stop string."""

from collections.abc import Sequence

from kvkeep.models.text.codec import TextCodec
from kvkeep.session.rendering import overlap

SEAM = 16  # preceding tokens to push first, as the first character may begin in them


class TextStream:
    """Text of pushed tokens; an end that may begin a stop string is held back.

    context: the preceding tokens, which may end inside a character. stop_found: the stop string
    that ended the text.
    """

    def __init__(self, text: TextCodec, stop: tuple[str, ...], context: Sequence[int] = ()):
        self._pieces = text.piece_stream(skip_special=True)
        for token in context[-SEAM:]:
            self._pieces.push(token)
        self._stop = stop
        self._held = ""
        self.stop_found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_found is not None

    def push(self, token: int) -> str:
        """Append a token; return the text that is now certain."""
        return self._release(self._pieces.push(token))

    def flush(self) -> str:
        """Return the text that was held back, at the end of the tokens."""
        certain = self._release(self._pieces.flush())
        held, self._held = self._held, ""
        return certain + held

    def all_of(self, tokens: Sequence[int]) -> str:
        """Push tokens, and return their text and what was held back."""
        return "".join(map(self.push, tokens)) + self.flush()

    def _release(self, piece: str) -> str:
        """Append a piece; return the text that cannot be part of a stop string."""
        if self.stopped:
            return ""
        self._held += piece
        matches = [(index, stop) for stop in self._stop if (index := self._held.find(stop)) >= 0]
        if matches:
            end, self.stop_found = min(matches)
            certain, self._held = self._held[:end], ""
            return certain
        uncertain = max((overlap(self._held, stop[:-1]) for stop in self._stop), default=0)
        end = len(self._held) - uncertain
        certain, self._held = self._held[:end], self._held[end:]
        return certain


def pieces_of(text: TextCodec, context: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the tokens before it, special tokens included.

    context: the preceding tokens; the last `SEAM` are enough. An incomplete end is U+FFFD.
    """
    stream = text.piece_stream()
    for token in context[-SEAM:]:
        stream.push(token)
    pieces = [stream.push(token) for token in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces
