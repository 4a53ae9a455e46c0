"""Streaming detokenization: whole characters, ending before a stop string."""

from collections.abc import Sequence

from kvkeep.models.text.codec import TextCodec
from kvkeep.session.rendering import overlap_length

CONTEXT_TOKENS = 16  # preceding tokens to push first, as the first character may begin in them


class TextStream:
    """Text of pushed tokens; an end that may begin a stop string is held back.

    context: the preceding tokens, which may end inside a character. matched_stop: what ended it.
    """

    def __init__(self, codec: TextCodec, stop: tuple[str, ...], context: Sequence[int] = ()):
        self._codec = codec
        self._pieces = codec.piece_stream(skip_special=True)
        for token in context[-CONTEXT_TOKENS:]:
            self._pieces.push(token)
        self._stop = stop
        self._held = ""
        self.matched_stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, token: int) -> str:
        """Append a token; return the text that is now certain."""
        return "".join(p for p in self.push_pieces(token) if isinstance(p, str))

    def push_pieces(self, token: int) -> list[str | int]:
        """Append a token; return the text that is now certain, and a control token's id after it.

        A stop string does not reach across a control token.
        """
        released = self._release(self._pieces.push(token))
        if not self._codec.is_control(token) or self.stopped:
            return [released] if released else []
        released, self._held = released + self._held, ""
        return [released, token] if released else [token]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the tokens."""
        released = self._release(self._pieces.flush())
        held, self._held = self._held, ""
        return released + held

    def push_and_flush(self, tokens: Sequence[int]) -> str:
        """Push tokens, and return their text and what was held back."""
        return "".join(map(self.push, tokens)) + self.flush()

    def _release(self, piece: str) -> str:
        """Append a piece; return the text that cannot be part of a stop string."""
        if self.stopped:
            return ""
        self._held += piece
        matches = [(index, stop) for stop in self._stop if (index := self._held.find(stop)) >= 0]
        if matches:
            end, self.matched_stop = min(matches)
            released, self._held = self._held[:end], ""
            return released
        overlap = max((overlap_length(self._held, stop[:-1]) for stop in self._stop), default=0)
        end = len(self._held) - overlap
        released, self._held = self._held[:end], self._held[end:]
        return released


def token_texts(codec: TextCodec, context: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the tokens before it, special tokens included.

    context: the preceding tokens; `CONTEXT_TOKENS` of them are enough. An incomplete end is U+FFFD.
    """
    stream = codec.piece_stream()
    for token in context[-CONTEXT_TOKENS:]:
        stream.push(token)
    pieces = [stream.push(token) for token in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces
