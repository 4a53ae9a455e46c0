"""Made-up facts between the sentences of a real text."""

from dataclasses import dataclass

from kvkeep.evaluate.facts import ANYWHERE, Sample, Where, hide, random_of, require_known
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.tasks import TASKS


@dataclass(frozen=True)
class Needle:
    """Samples with facts such as "The lucky number of Emma is 52163." in a stretch of a text.

    tokens: of the stretch. keys: of `KEYS`; None for the first kind that the task has.
    task: of `TASKS`.
    """

    haystack: Haystack
    tokens: int = 4000
    keys: str | None = None
    task: str = "single"
    where: Where = ANYWHERE
    seed: int = 0

    def __post_init__(self) -> None:
        keys_of(self.task, self.keys)

    def sample(self, index: int) -> Sample:
        random, keys = random_of(self.seed, index), keys_of(self.task, self.keys)
        posed = TASKS[self.task].pose(random, keys)
        count = len(posed.sentences)
        pieces = self.haystack.stretch(self.tokens, max(2, count), random)
        choose = self.where.places_in_order if posed.ordered else self.where.places
        places = choose(index, len(pieces), count, random)
        return hide(pieces, posed.sentences, posed.asked, places)


def keys_of(task: str, keys: str | None) -> str:
    """The kind of keys that a task hides. Raises InvalidArgument for a name that it has not."""
    require_known(task, TASKS)
    if keys is None:
        return TASKS[task].keys[0]
    require_known(keys, TASKS[task].keys)
    return keys
