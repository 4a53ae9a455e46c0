"""Drafts from the place in a session's own text that its newest tokens repeat (prompt lookup)."""

from collections.abc import Sequence

from kvkeep.session.drafts import Draft
from kvkeep.session.ngram_index import MATCH_TOKENS, NgramIndex

_REALIGN_TOKENS = 16  # of the source, in which the newest tokens are looked for after a mismatch
_MAX_MISMATCHES = 4  # steps without a match, after which a source is given up
_LASTING_TOKENS = 8  # the longest common run of a source that outlasts a mismatch, at least


class DraftSource:
    """The place in a text that its newest tokens repeat: what follows there is a draft.

    A source is found by the last place of the newest run of tokens, and then followed: the records
    of a list and the lines of a program begin alike, so that the last place of a run is often that
    of the record before, and the source goes on with the right one. Where the text differs from
    it after a run of eight or more equal tokens, the source goes on where the newest tokens come
    again soon after; otherwise one token counts as replaced by another.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self._index = NgramIndex(tokens)
        self._next: int | None = None  # the index of the source's next token in the text
        self._longest = 0  # common run when it was followed, in tokens
        self._mismatches = 0  # steps since the last common run

    @property
    def tokens(self) -> Sequence[int]:
        """The newest tokens of the text; see `NgramIndex`."""
        return self._index.tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, one of them for each of the source."""
        count = len(self.tokens)
        self._index.extend(tokens)
        if self._next is not None:
            self._next += len(tokens)
        if len(self.tokens) != count + len(tokens):  # the oldest have been removed
            self._next = None

    def draft(self, next_token: int, max_tokens: int) -> Draft | None:
        """Return a draft of at most `max_tokens` after `next_token`, which is not in the text yet.

        Returns None if there is no source.
        """
        end = self._followed_end(next_token)
        if end is None:
            end = self._index.last_end(next_token)
            if end is not None and self._next is None:
                self._next, self._longest, self._mismatches = end - 1, 0, 0
        if end is None and self._next is not None:
            end = self._next + 1
        if end is None:
            return None
        matched = self._index.count_matched(end, next_token)
        return Draft(self._index.tokens[end : end + max_tokens].tolist(), matched)

    def _followed_end(self, next_token: int) -> int | None:
        """Return the end of the newest run in the source; None if the source does not have it."""
        text = self._index.tokens
        if self._next is None or self._next >= len(text):
            self._next = None
            return None
        if text[self._next] != next_token and not self._realign(next_token):
            self._mismatches += 1
            if self._mismatches > _MAX_MISMATCHES or self._longest < _LASTING_TOKENS:
                self._next = None
            return None
        matched = self._index.count_matched(self._next + 1, next_token)
        self._longest = max(self._longest, matched)
        if matched >= MATCH_TOKENS:
            self._mismatches = 0
        return self._next + 1

    def _realign(self, next_token: int) -> bool:
        """Go on in the source where the newest tokens come again; return whether they do."""
        assert self._next is not None
        if self._longest < _LASTING_TOKENS:
            return False
        last = min(len(self._index.tokens), self._next + _REALIGN_TOKENS)
        ends = range(max(1, self._next), last)
        matches = [self._index.count_matched(end, next_token) for end in ends]
        if not matches or (longest := min(max(matches), MATCH_TOKENS)) < MATCH_TOKENS - 1:
            return False
        self._mismatches += longest < MATCH_TOKENS
        self._next = next(e for e, m in zip(ends, matches, strict=True) if m >= longest) - 1
        return True
