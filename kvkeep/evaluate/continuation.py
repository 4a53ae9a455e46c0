"""Real text that is read up to a point, and is then to be foretold."""

from dataclasses import dataclass

from kvkeep.evaluate.facts import Sample, random_of
from kvkeep.evaluate.haystack import Haystack

FORETOLD = 512  # tokens


@dataclass(frozen=True)
class Continuation:
    """Samples whose last `FORETOLD` tokens are foretold from a memory of those before.

    tokens: of those before, about.
    """

    haystack: Haystack
    tokens: int = 4000
    seed: int = 0

    def sample(self, index: int) -> Sample:
        pieces = self.haystack.stretch(self.tokens + FORETOLD, 2, random_of(self.seed, index))
        return Sample("".join(pieces), (), 0, len(pieces), FORETOLD)
