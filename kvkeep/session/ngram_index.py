"""Index of the runs of tokens in a text that grows."""

from array import array
from collections.abc import Sequence

import numpy as np

MATCH_TOKENS = 3  # the shortest run of tokens that is looked up
INDEXED_TOKENS = 2**16  # of a longer text: indexing millions takes seconds
_MAX_MATCH = 24  # longer runs are not told apart
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # of the tokens of a run, in its hash
_HASH_BITS, _MIN_TABLE_BITS = 32, 10


class NgramIndex:
    """Index of the last place of each run of `MATCH_TOKENS` tokens in a text that grows.

    A hash table of 32-bit numbers: of two runs with one hash it keeps the newer.

    tokens: the newest of the text, `INDEXED_TOKENS` to twice as many.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens = array("i")
        self._table_bits = _MIN_TABLE_BITS
        self._ends = array("i", bytes(4 << _MIN_TABLE_BITS))  # of runs, by hash; 0 for none
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        if len(self.tokens) > 2 * INDEXED_TOKENS:
            self.tokens = self.tokens[-INDEXED_TOKENS:]
            self._rebuild()
            return
        if 2 * len(self.tokens) > len(self._ends):
            self._rebuild()
            return
        text = self.tokens
        # The newest run has no token after it yet.
        for end in range(max(first, MATCH_TOKENS), len(text)):
            self._ends[self._slot(text[end - 3], text[end - 2], text[end - 1])] = end

    def last_end(self, next_token: int) -> int | None:
        """Return the end of the last run that equals the newest one, `next_token` included.

        next_token: is not in the text yet. Returns None if the run has not come before, or is not
        known to have: another one may have its place in the table.
        """
        text, count = self.tokens, len(self.tokens)
        if count < MATCH_TOKENS - 1:
            return None
        run = (text[count - 2], text[count - 1], next_token)
        end = self._ends[self._slot(*run)]
        return end if end and (text[end - 3], text[end - 2], text[end - 1]) == run else None

    def count_matched(self, end: int, next_token: int) -> int:
        """Return how many tokens before `end` equal the newest ones, `next_token` included."""
        text, count = self.tokens, len(self.tokens)
        if text[end - 1] != next_token:
            return 0
        matched = 1
        while matched < min(_MAX_MATCH, end) and text[end - matched - 1] == text[count - matched]:
            matched += 1
        return matched

    def _slot(self, first: int, second: int, third: int) -> int:
        """Return the place of a run in the table."""
        one, two, three = _FACTORS
        mixed = (first * one) ^ (second * two) ^ (third * three)
        return (mixed & 0xFFFFFFFF) >> (_HASH_BITS - self._table_bits)

    def _rebuild(self) -> None:
        """Make the table four times as large as the text, or more."""
        count = len(self.tokens)
        self._table_bits = (4 * count).bit_length()
        self._ends = array("i", bytes(4 << self._table_bits))
        if count <= MATCH_TOKENS:
            return
        text = np.array(self.tokens, dtype=np.uint64)
        runs = zip((text[:-3], text[1:-2], text[2:-1]), _FACTORS, strict=True)
        first, second, third = (tokens * np.uint64(factor) for tokens, factor in runs)
        mixed = (first ^ second ^ third) & np.uint64(0xFFFFFFFF)
        slots = (mixed >> np.uint64(_HASH_BITS - self._table_bits)).astype(np.int64)
        ends = np.frombuffer(self._ends, dtype=np.int32)
        # Of equal slots the last, which is the newest, stays.
        ends[slots] = np.arange(MATCH_TOKENS, count, dtype=np.int32)
