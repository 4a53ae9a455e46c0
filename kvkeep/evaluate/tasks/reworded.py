"""Questions in other words than the text's: what is asked for was never called that."""

from dataclasses import dataclass
from random import Random

from kvkeep.evaluate.facts import Fact
from kvkeep.evaluate.tasks.counted import WORDS_ONLY
from kvkeep.evaluate.tasks.task import Posed
from kvkeep.evaluate.words import ANIMALS, CITIES, INSTRUMENTS, MONTHS, NAMES


@dataclass(frozen=True)
class _Story:
    """said and asked have no word in common but the name."""

    said: str
    asked: str
    answers: tuple[str, ...]


STORIES = (
    _Story(
        "As a child {name} went to school in {answer}.",
        "Which town did {name} grow up in? {name} grew up in",
        CITIES,
    ),
    _Story(
        "At home {name} feeds a {answer} twice a day.",
        "Which pet does {name} have? {name} has a",
        ANIMALS,
    ),
    _Story(
        "On Sundays {name} practises the {answer}.",
        "What music does {name} make? {name} plays the",
        INSTRUMENTS,
    ),
    _Story(
        "{name} was born on a cold day in {answer}.",
        "When is the birthday of {name}? The birthday of {name} is in",
        MONTHS,
    ),
)


@dataclass(frozen=True)
class Reworded:
    """One thing is told of one person, and asked for in other words."""

    keys: tuple[str, ...] = WORDS_ONLY

    def pose(self, random: Random, keys: str) -> Posed:
        name, story = random.choice(NAMES), random.choice(STORIES)
        answer = random.choice(story.answers)
        said = story.said.format(name=name, answer=answer)
        fact = Fact(f" {said}", f"\n\n{story.asked.format(name=name)}", answer)
        return Posed((fact.sentence,), (fact,))
