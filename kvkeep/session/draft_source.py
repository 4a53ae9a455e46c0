"""Drafts from the place in a session's own text that its newest tokens repeat (prompt lookup)."""

from collections.abc import Sequence

from kvkeep.session.drafts import Draft
from kvkeep.session.ngram_index import MATCH_TOKENS, NgramIndex

_TOKENS_BEFORE, _TOKENS_AFTER = 8, 16  # of the source, looked through after a mismatch
_MAX_MISMATCHES = 4  # searches without a common run; with one more a source is given up
_LASTING_RUN = 8  # the longest common run of a source that outlasts a mismatch, at least
_BETTER_RUN = 12  # of another place, for which a source that does not match is left


class DraftSource:
    """The place in a text that its newest tokens repeat: what follows there is a draft.

    A source is found by the last place of the newest run of tokens, and then followed: the records
    of a list and the lines of a program begin alike, so that the last place of a run is often that
    of the record before, and the source goes on with the right one.

    Where the text differs from the source, a short common run was a coincidence, and the source is
    given up. After a run of eight or more it goes on where the newest tokens come again nearby.
    Otherwise the draft is that of another place, or one token counts as replaced by another and the
    source goes on with the next one.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self._index = NgramIndex(tokens)
        self._next: int | None = None  # the index of the source's next token in the text
        self._longest = 0  # common run since the source is followed, in tokens
        self._mismatches = 0  # steps since the last common run

    @property
    def tokens(self) -> Sequence[int]:
        """The newest tokens of the text; see `NgramIndex`."""
        return self._index.tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; the source goes on by as many."""
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
        follows = (end := self._follow(next_token)) is not None
        if end is None:
            end = self._look_up(next_token)
        if end is None and self._next is not None:
            end = self._next + 1
        if end is None:
            return None
        matched = self._index.count_matched(end, next_token)
        if follows:
            self._longest = max(self._longest, matched)
            if matched >= MATCH_TOKENS:
                self._mismatches = 0
        following = self._index.tokens[end : end + max_tokens].tolist()
        if matched and len(following) < max_tokens:  # the text goes round
            period = [*following, next_token]
            following = (period * -(-max_tokens // len(period)))[:max_tokens]
        return Draft(following, matched)

    def _follow(self, next_token: int) -> int | None:
        """Return the end of the newest run in the source, or None after a mismatch."""
        text = self._index.tokens
        if self._next is None or self._next >= len(text):
            self._next = None
            return None
        if text[self._next] != next_token and not self._realign(next_token):
            self._mismatches += 1
            if self._mismatches > _MAX_MISMATCHES or self._longest < _LASTING_RUN:
                self._next = None
            return None
        return self._next + 1

    def _look_up(self, next_token: int) -> int | None:
        """Return the end of the last place of the newest run, which may be the source from now on.

        Returns None if it has not come before.
        """
        end = self._index.last_end(next_token)
        if end is not None and (
            self._next is None or self._index.count_matched(end, next_token) >= _BETTER_RUN
        ):
            self._next, self._longest, self._mismatches = end - 1, 0, 0
        return end

    def _realign(self, next_token: int) -> bool:
        """Go on in the source where the newest tokens come again; return whether they do."""
        assert self._next is not None
        if self._longest < _LASTING_RUN:
            return False
        expected, count = self._next + 1, len(self._index.tokens)
        ends = range(max(1, expected - _TOKENS_BEFORE), min(count, expected + _TOKENS_AFTER))
        runs = {end: self._index.count_matched(end, next_token) for end in ends}
        longest = min(max(runs.values(), default=0), MATCH_TOKENS)
        if longest < MATCH_TOKENS - 1:
            return False
        self._mismatches += longest < MATCH_TOKENS
        nearest = min((e for e in ends if runs[e] >= longest), key=lambda e: abs(e - expected))
        self._next = nearest - 1
        return True
