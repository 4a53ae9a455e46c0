"""Common words and frequent words: which were said most often?"""

from dataclasses import dataclass
from random import Random

from kvkeep.evaluate.facts import Fact
from kvkeep.evaluate.tasks.task import Posed
from kvkeep.evaluate.words import COUNTS

SAID_AT_ONCE = 5  # words in one sentence
WORDS_ONLY = ("words",)


@dataclass(frozen=True)
class Counted:
    """Words are said, some more often than others, a few in each sentence, in any order.

    The other ones of the `most` frequent named, one of them is asked for.

    words: to draw from. times: how often each of those drawn is said, the most frequent first.
    name: what one is called.
    """

    words: tuple[str, ...]
    times: tuple[int, ...]
    name: str
    most: int = 3
    keys: tuple[str, ...] = WORDS_ONLY

    def pose(self, random: Random, keys: str) -> Posed:
        drawn = random.sample(self.words, len(self.times))
        said = [word for word, times in zip(drawn, self.times, strict=True) for _ in range(times)]
        random.shuffle(said)
        sentences = tuple(
            f" {self.name.capitalize()}s: {', '.join(said[start : start + SAID_AT_ONCE])}."
            for start in range(0, len(said), SAID_AT_ONCE)
        )
        asked, *named = random.sample(drawn[: self.most], self.most)
        first = next(each for each in sentences if asked in each)
        question = (
            f"\n\nWhich {COUNTS[self.most]} {self.name}s were said most often? "
            f"The {COUNTS[self.most]} most frequent {self.name}s are {', '.join(named)} and"
        )
        return Posed(sentences, (Fact(first, question, asked),))
