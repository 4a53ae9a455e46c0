"""Variable tracking: a value goes from variable to variable."""

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase

from kvkeep.evaluate.facts import KEYS, Fact, draw_key
from kvkeep.evaluate.tasks.task import Posed

LETTERS = 3  # of a variable's name


@dataclass(frozen=True)
class Variables:
    """One chain of assignments, in its order. Each link of it is asked for.

    hops: from the first variable to the last.
    """

    hops: int
    keys: tuple[str, ...] = KEYS

    def pose(self, random: Random, keys: str) -> Posed:
        names = _names(self.hops + 1, random)
        values = (draw_key(keys, random), *names)
        links = tuple(
            Fact(
                f" VAR {name} = {value}.",
                f"\n\nWhat is the value of each variable? VAR {name} =",
                value,
            )
            for name, value in zip(names, values, strict=False)
        )
        return Posed(tuple(link.sentence for link in links), links, ordered=True)


def _names(count: int, random: Random) -> list[str]:
    """No two begin with the same letter."""
    begun = random.sample(ascii_uppercase, count)
    return [first + "".join(random.choices(ascii_uppercase, k=LETTERS - 1)) for first in begun]
