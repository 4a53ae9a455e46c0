"""Made-up facts between the sentences of a real text."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Self

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.facts import (
    ANYWHERE,
    TASKS,
    Fact,
    Sample,
    Where,
    check_kinds,
    draw_key,
    hide,
    random_of,
)
from kvkeep.evaluate.words import NAMES

SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s+[A-Z])")
THINGS = {
    "number": ("lucky number", "locker code", "badge number", "phone extension"),
    "words": ("secret password", "call sign", "code name", "magic phrase"),
}
DRAWS = 100  # of a stretch, at most
ENOUGH = 0.75  # of the tokens asked for
TEMPLATES = (
    ("The {thing} of {name} is {key}.", "What is the {thing} of {name}? The {thing} of {name} is"),
    (
        "It is a secret that the {thing} of {name} is {key}.",
        "What is the {thing} of {name}? The {thing} of {name} is",
    ),
    (
        "{name} will always remember the {thing} {key}.",
        "Which {thing} will {name} always remember? {name} will always remember the {thing}",
    ),
    (
        "Only {name} knows that the {thing} is {key}.",
        "Which {thing} does only {name} know? Only {name} knows that the {thing} is",
    ),
)


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


@dataclass(frozen=True)
class Needle:
    """Samples with facts such as "The lucky number of Emma is 52163." in a stretch of a text.

    tokens: of the stretch. task: as of `Passkey`, with people and things drawn at random.
    """

    haystack: Haystack
    tokens: int = 4000
    keys: str = "number"
    task: str = "single"
    where: Where = ANYWHERE
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self.task, self.keys)

    def sample(self, index: int) -> Sample:
        random, task = random_of(self.seed, index), TASKS[self.task]
        names = random.sample(NAMES, task.hidden)
        things = random.sample(THINGS[self.keys], task.hidden)
        template = random.choice(TEMPLATES)
        facts = [
            _fact(template, name, thing, draw_key(self.keys, random))
            for name, thing in zip(names, self._alike(things), strict=True)
        ]
        pieces = self.haystack.stretch(self.tokens, max(2, task.hidden), random)
        first = self.where.choose(index, len(pieces), random)
        return hide(pieces, facts, task.asked, first, random)

    def _alike(self, things: list[str]) -> list[str]:
        """Of several people one and the same thing is said, so that the name decides."""
        return things[:1] * len(things) if self.task == "several" else things


def _fact(template: tuple[str, str], name: str, thing: str, key: str) -> Fact:
    said, asked = (part.format(name=name, thing=thing, key=key) for part in template)
    return Fact(f" {said}", f"\n\n{asked}", key)
