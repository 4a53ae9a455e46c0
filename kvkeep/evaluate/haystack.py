"""Real texts that facts are hidden in, sentence by sentence."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Self

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.docstrings import docstrings_text
from kvkeep.evaluate.manual import manual_text

TEXTS: dict[str, Callable[[], str]] = {"manual": manual_text, "docstrings": docstrings_text}
MANUAL = "manual"
SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s+[A-Z])")
DRAWS = 100  # of a stretch, at most
ENOUGH = 0.75  # of the tokens asked for


@dataclass(frozen=True)
class Haystack:
    """A long text in sentences. tokens: about how many each has."""

    sentences: tuple[str, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, text: str, count: Callable[[str], int]) -> Self:
        """count: gives the tokens of a piece of text."""
        sentences = tuple(SENTENCE_END.split(text))
        return cls(sentences, tuple(count(sentence) for sentence in sentences))

    def stretch(self, tokens: int, minimum: int, random: Random) -> list[str]:
        """Sentences that follow each other from anywhere on, of about `tokens` tokens in all.

        Where what comes next is a table or a program that is too long, it is drawn again.

        minimum: how many sentences there are to be, even if that takes more tokens.
        Raises InvalidArgument if the whole text is shorter.
        """
        ends = list(itertools.accumulate(self.tokens))
        latest = bisect_right(ends, ends[-1] - tokens)  # sentences that can be left out before
        if tokens > ends[-1] or len(self.sentences) - latest < minimum:
            raise InvalidArgument(
                f"the text has {ends[-1]:,} tokens; found {tokens:,}: ask for fewer"
            )
        for _ in range(DRAWS):
            start = random.randrange(latest + 1)
            begun = ends[start] - self.tokens[start]
            end = max(bisect_right(ends, begun + tokens), start + minimum)
            if ends[end - 1] - begun >= ENOUGH * tokens:
                break
        return list(self.sentences[start:end])
