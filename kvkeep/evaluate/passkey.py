"""Pass keys in repeated text, as in llama.cpp's example "passkey"."""

import dataclasses
from dataclasses import dataclass
from random import Random

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.facts import (
    ANYWHERE,
    KEYS,
    Fact,
    Sample,
    Where,
    draw_key,
    hide,
    random_of,
    require_known,
)
from kvkeep.evaluate.words import NAMES

PREFIX = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
JUNK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PASSKEY_TASKS = {"single": (1, 1), "several": (4, 1), "second": (2, 2)}  # hidden, asked for
SECOND = ("pass key", "door code")  # what the two facts of the task "second" are called


@dataclass(frozen=True)
class Passkey:
    """Samples with keys among `junk` repetitions of the same five sentences.

    task: "single" asks for the only key; "several" hides the keys of four people and asks for
    one; "second" hides two keys and asks for one and then, anew, for the other.
    """

    junk: int = 250
    keys: str = "number"
    task: str = "single"
    where: Where = ANYWHERE
    seed: int = 0

    def __post_init__(self) -> None:
        require_known(self.task, PASSKEY_TASKS)
        require_known(self.keys, KEYS)
        hidden, _ = PASSKEY_TASKS[self.task]
        if self.junk < hidden:
            raise InvalidArgument(
                f"task {self.task!r} hides {hidden} keys in places of their own; "
                f"found {self.junk} repetitions"
            )
        if self.where.place is not None and not 0 <= self.where.place < self.junk:
            raise InvalidArgument(
                f"a key's position must be 0 to {self.junk - 1}, before one of {self.junk} "
                f"repetitions; found {self.where.place}"
            )

    def sample(self, index: int) -> Sample:
        random = random_of(self.seed, index)
        facts = [_fact(subject, draw_key(self.keys, random)) for subject in self._subjects(random)]
        _, asked = PASSKEY_TASKS[self.task]
        places = self.where.places(index, self.junk, len(facts), random)
        sentences = [fact.sentence for fact in facts]
        hidden = hide([JUNK] * self.junk, sentences, facts[:asked], places)
        return dataclasses.replace(hidden, text=PREFIX + hidden.text)

    def _subjects(self, random: Random) -> list[str]:
        hidden, _ = PASSKEY_TASKS[self.task]
        if self.task == "several":
            return [f"pass key of {name}" for name in random.sample(NAMES, hidden)]
        return list(SECOND[:hidden])


def _fact(subject: str, key: str) -> Fact:
    return Fact(
        f" The {subject} is {key}. Remember it. {key} is the {subject}.",
        f" What is the {subject}? The {subject} is",
        key,
    )
