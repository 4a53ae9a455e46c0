"""Questions in other words than the text's: what is asked for was never called that."""

from dataclasses import dataclass
from random import Random

from kvkeep.evaluate.facts import Fact
from kvkeep.evaluate.tasks.counted import WORDS_ONLY
from kvkeep.evaluate.tasks.task import Posed
from kvkeep.evaluate.words import CITIES, INSTRUMENTS, MONTHS, NAMES


@dataclass(frozen=True)
class _Story:
    """said and asked share the name, and of other words none that means anything."""

    said: str
    asked: str
    answers: tuple[str, ...]


STORIES = (
    _Story(
        "As a child {name} went to school in {answer}.",
        "Where did {name} grow up? {name} grew up in the city of",
        CITIES,
    ),
    _Story(
        "{name} has a small house in {answer}.",
        "Where does {name} live? {name} lives in the city of",
        CITIES,
    ),
    _Story(
        "A train takes {name} home to {answer} every evening.",
        "Where does {name} live? {name} lives in the city of",
        CITIES,
    ),
    _Story(
        "The office where {name} earns a living is in {answer}.",
        "In which city does {name} work? {name} works in the city of",
        CITIES,
    ),
    _Story(
        "{name} was born on a cold day in {answer}.",
        "When is the birthday of {name}? The birthday of {name} is in the month of",
        MONTHS,
    ),
    _Story(
        "On Sundays {name} practises the {answer}.",
        "Which instrument does {name} play? {name} plays the",
        INSTRUMENTS,
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
