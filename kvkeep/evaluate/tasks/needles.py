"""Needles: what is said of a person, asked for in the same words."""

from dataclasses import dataclass
from random import Random

from kvkeep.evaluate.facts import KEYS, Fact, draw_key
from kvkeep.evaluate.tasks.task import Posed
from kvkeep.evaluate.words import COUNTS, NAMES

THINGS = {
    "number": ("lucky number", "locker code", "badge number", "phone extension"),
    "words": ("secret password", "call sign", "code name", "magic phrase"),
}
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
class Needles:
    """Keys of `hidden` people, and the first `asked` of them are asked for, each by itself.

    same_thing: of all people one and the same thing is said, so that the name decides.
    """

    hidden: int
    asked: int
    same_thing: bool = False
    keys: tuple[str, ...] = KEYS

    def pose(self, random: Random, keys: str) -> Posed:
        names = random.sample(NAMES, self.hidden)
        things = random.sample(THINGS[keys], self.hidden)
        if self.same_thing:
            things = things[:1] * self.hidden
        template = random.choice(TEMPLATES)
        facts = [
            _fact(template, name, thing, draw_key(keys, random))
            for name, thing in zip(names, things, strict=True)
        ]
        return Posed(tuple(fact.sentence for fact in facts), tuple(facts[: self.asked]))


@dataclass(frozen=True)
class MultiValue:
    """One person has several keys, each said by itself. The others named, one is asked for."""

    values: int
    keys: tuple[str, ...] = KEYS

    def pose(self, random: Random, keys: str) -> Posed:
        name, thing = random.choice(NAMES), random.choice(THINGS[keys])
        asked, *named = (draw_key(keys, random) for _ in range(self.values))
        sentences = tuple(f" One of the {thing}s of {name} is {key}." for key in (asked, *named))
        all_of_them = f"{COUNTS[self.values]} {thing}s of {name}"
        question = f"\n\nWhat are the {all_of_them}? The {all_of_them} are {', '.join(named)} and"
        return Posed(sentences, (Fact(sentences[0], question, asked),))


def _fact(template: tuple[str, str], name: str, thing: str, key: str) -> Fact:
    said, asked = (part.format(name=name, thing=thing, key=key) for part in template)
    return Fact(f" {said}", f"\n\n{asked}", key)
