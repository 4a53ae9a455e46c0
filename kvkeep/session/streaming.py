"""Streaming detokenization: whole characters, ending before a stop string."""

from collections import deque
from collections.abc import Sequence

from kvkeep.models.text.codec import TextCodec
from kvkeep.session.rendering import overlap_length
from kvkeep.session.stop_gate import ReasoningMarkers, StopGate

CONTEXT_TOKENS = 16  # preceding tokens to push first, as the first character may begin in them


class TextStream:
    """Text of pushed tokens; an end that may begin a stop string is held back.

    The stop string that is complete first ends the text, wherever the borders of tokens are; of
    several that are complete with the same character, the longest.

    context: the preceding tokens, which may end inside a character. reasoning: the markers of
    reasoning at the beginning, in which stop strings count for nothing. matched_stop: what ended
    it.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: tuple[str, ...],
        context: Sequence[int] = (),
        reasoning: ReasoningMarkers | None = None,
    ):
        self._codec = codec
        self._pieces = codec.piece_stream(skip_special=True)
        for token in context[-CONTEXT_TOKENS:]:
            self._piece(token)
        self._stop = stop
        self._gate = StopGate(reasoning) if stop and reasoning else None
        self._held = ""
        self._pushed_chars, self._released_chars = 0, 0
        self._withheld = deque[int]()  # `_pushed_chars` after each token with text that is not out
        self.matched_stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    @property
    def withheld_tokens(self) -> int:
        """The number of last tokens whose text was not returned, such as a stop string's."""
        return len(self._withheld)

    def push(self, token: int) -> str:
        """Append a token; return the text that is now certain."""
        return "".join(p for p in self.push_pieces(token) if isinstance(p, str))

    def push_pieces(self, token: int) -> list[str | int]:
        """Append a token; return the text that is now certain, and a control token's id after it.

        Neither a stop string nor a character reaches across a control token.
        """
        released = self._release(self._piece(token), self._codec.control_text(token))
        self._withheld.append(self._pushed_chars)
        is_control = self._codec.is_control(token) and not self.stopped
        if is_control:
            released, self._held = released + self._held, ""
        self._count_released(released)
        text_pieces: list[str | int] = [released] if released else []
        return [*text_pieces, token] if is_control else text_pieces

    def flush(self) -> str:
        """Return the text that was held back, at the end of the tokens."""
        released = self._release(self._pieces.flush())
        released, self._held = released + self._held, ""
        self._count_released(released)
        return released

    def push_and_flush(self, tokens: Sequence[int]) -> str:
        """Push tokens, and return their text and what was held back."""
        return "".join(map(self.push, tokens)) + self.flush()

    def _piece(self, token: int) -> str:
        """Return the text that a token completes; half a character ends at a control token."""
        before = self._pieces.flush() if self._codec.is_control(token) else ""
        return before + self._pieces.push(token)

    def _release(self, piece: str, control: str = "") -> str:
        """Append a piece; return the text that cannot be part of a stop string.

        control: the text of a control token behind it.
        """
        self._pushed_chars += len(piece)
        if self.stopped:
            return ""
        free = self._gate.free_length(piece, control) if self._gate else 0
        reasoning = ""
        if free:
            reasoning, self._held = self._held + piece[:free], ""
        return reasoning + self._release_answer(piece[free:])

    def _release_answer(self, piece: str) -> str:
        self._held += piece
        starts = {stop: self._held.find(stop) for stop in self._stop}
        if matches := [(i + len(stop), i, stop) for stop, i in starts.items() if i >= 0]:
            _, end, self.matched_stop = min(matches)
            released, self._held = self._held[:end], ""
            return released
        overlap = max((overlap_length(self._held, stop[:-1]) for stop in self._stop), default=0)
        end = len(self._held) - overlap
        released, self._held = self._held[:end], self._held[end:]
        return released

    def _count_released(self, text: str) -> None:
        self._released_chars += len(text)
        while self._withheld and self._withheld[0] <= self._released_chars:
            self._withheld.popleft()


def markers_behind(
    codec: TextCodec, markers: ReasoningMarkers, tokens: Sequence[int]
) -> ReasoningMarkers:
    """Return the markers for what follows an answer's first tokens. markers: of all of it."""
    gate, stream = StopGate(markers), TextStream(codec, ())
    for token in tokens:
        for piece in stream.push_pieces(token):
            if isinstance(piece, str):
                gate.free_length(piece)
            else:
                gate.free_length("", codec.control_text(piece))
        if gate.in_answer:
            break
    return gate.markers


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
