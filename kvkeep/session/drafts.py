"""Drafts of the next tokens from a session's own text, and how many of them are worth trying.

Where the newest tokens have come before, those that followed then are a draft (prompt lookup). How
long it may be depends on how often such drafts were right, and on what a row of a forward costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MATCH_TOKENS = 3  # the shortest run of tokens that is looked up
_MAX_MATCH = 24  # longer runs are not told apart
_WEIGHT = 0.15  # of a new measurement, in averages
_ROW_COST = 0.17  # of one more row, relative to a forward of one, until it is measured
_WORTH_TRYING = 1.03  # the least expected gain


@dataclass(frozen=True)
class DraftCounts:
    """How many tokens of drafts were tried, and how many of these were sampled."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next, after a run of `matched` tokens that had come before."""

    tokens: Sequence[int]
    matched: int


class NgramIndex:
    """Index of the last place of each run of `MATCH_TOKENS` tokens in a text that grows."""

    def __init__(self, tokens: Sequence[int] = ()):
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # the last end of each run but the newest
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            end = len(self._tokens)
            if end >= MATCH_TOKENS:
                self._ends[tuple(self._tokens[end - MATCH_TOKENS :])] = end
            self._tokens.append(token)

    def draft(self, next_token: int, max_tokens: int) -> Draft | None:
        """Return what followed the longest known end of the text, `next_token` included.

        next_token: is not in the text yet. Returns None if its end has not come before.
        """
        text, first = self._tokens, len(self._tokens) + 1 - MATCH_TOKENS
        if first < 0:
            return None
        end = self._ends.get((*text[first:], next_token))
        if end is None:
            return None
        matched, back = MATCH_TOKENS, len(text) + 1
        while (
            matched < min(_MAX_MATCH, end) and text[end - matched - 1] == text[back - matched - 1]
        ):
            matched += 1
        return Draft(text[end : end + max_tokens], matched)


class DraftLength:
    """Chooses how many tokens of a draft to try, by their acceptance and the cost of rows.

    Each length of a match, doubled, has an acceptance of its own: 3 to 5 matched tokens, 6 to 11,
    and more. If `a` of `n` tokens were right, the estimate moves towards a / (a + 1), or 1 for
    all. Without a gain now, a draft is tried again after a pause that doubles each time.
    """

    def __init__(self) -> None:
        self._acceptance = [0.6, 0.75, 0.85]
        self._pauses, self._waits = [1, 1, 1], [0, 0, 0]
        self._row_cost = _ROW_COST
        self._one_row_seconds = 0.0

    def choose(self, draft: Draft) -> int:
        """Return how many tokens of a draft to try; 0 for none."""
        kind, count = _kind(draft), len(draft.tokens)
        rate, best, best_gain = self._acceptance[kind], 0, _WORTH_TRYING
        expected, likely = 1.0, 1.0
        for length in range(1, count + 1):
            likely *= rate
            expected += likely
            gain = expected / (1 + self._row_cost * length)
            if gain > best_gain:
                best, best_gain = length, gain
        if best:
            return best
        self._waits[kind] += 1
        if self._waits[kind] < self._pauses[kind]:
            return 0
        self._waits[kind], self._pauses[kind] = 0, min(256, 2 * self._pauses[kind])
        return min(2, count)

    def learn(self, draft: Draft, tried: int, accepted: int) -> None:
        """Take the result of a draft into account. accepted: of the `tried` tokens."""
        kind = _kind(draft)
        rate = 1.0 if accepted == tried else accepted / (accepted + 1)
        self._acceptance[kind] += _WEIGHT * (rate - self._acceptance[kind])
        if accepted == tried:
            self._pauses[kind] = 1

    def learn_cost(self, rows: int, seconds: float) -> None:
        """Take the duration of a forward into account."""
        if rows == 1:
            last = self._one_row_seconds or seconds
            # A forward that was interrupted by other work counts no more than twice as long.
            self._one_row_seconds = last + _WEIGHT * (min(seconds, 2 * last) - last)
        elif self._one_row_seconds:
            cost = (seconds / self._one_row_seconds - 1) / (rows - 1)
            limited = min(max(cost, 0.02), 1.0)
            self._row_cost += _WEIGHT * (limited - self._row_cost)


def _kind(draft: Draft) -> int:
    return 0 if draft.matched < 2 * MATCH_TOKENS else 1 if draft.matched < 4 * MATCH_TOKENS else 2
