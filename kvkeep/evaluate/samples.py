"""Evaluation samples: a text with hidden facts, and the questions about them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.words import WORDS

KEY_TYPES = ("number", "words")


@dataclass(frozen=True)
class Fact:
    """A sentence to hide, and a question that the answer (the key) continues."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """A text, and what is measured after its prefill."""

    text: str
    facts: tuple[Fact, ...]  # asked for in this order
    position: int  # of the first fact
    position_count: int  # of all possible positions
    continuation_tokens: int = 0  # at the end, which are scored instead of prefilled

    @property
    def depth(self) -> float:
        """The position of the first fact in percent of the text."""
        return 100 * self.position / max(1, self.position_count - 1)


@dataclass(frozen=True)
class Placement:
    """The position of the first fact: fixed, at depths (percent) in turn, or random.

    The other facts go to random positions.
    """

    position: int | None = None
    depths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if invalid := [depth for depth in self.depths if not 0 <= depth <= 100]:
            raise InvalidArgument(f"depths must be 0 to 100 percent; found {invalid[0]:g}")

    def draw(self, index: int, position_count: int, count: int, rng: Random) -> list[int]:
        """Return distinct positions for `count` sentences of sample `index`."""
        first = self._draw_first(index, position_count, rng)
        other_positions = [position for position in range(position_count) if position != first]
        return [first, *rng.sample(other_positions, count - 1)]

    def draw_ascending(self, index: int, position_count: int, count: int, rng: Random) -> list[int]:
        """Return ascending positions as `draw` does; the first leaves room for the others."""
        if self == ANYWHERE:
            return sorted(rng.sample(range(position_count), count))
        first = min(self._draw_first(index, position_count, rng), position_count - count)
        return [first, *sorted(rng.sample(range(first + 1, position_count), count - 1))]

    def _draw_first(self, index: int, position_count: int, rng: Random) -> int:
        if self.position is not None:
            return self.position
        if self.depths:
            return round(self.depths[index % len(self.depths)] / 100 * (position_count - 1))
        return rng.randrange(position_count)


ANYWHERE = Placement()


def sample_rng(seed: int, sample_index: int) -> Random:
    """Return a sample's own random number generator, independent of other samples."""
    return Random(f"{seed}/{sample_index}")


def random_key(key_type: str, rng: Random) -> str:
    """Return five digits, or three words such as "Chewy-Tiger-Amazon"."""
    if key_type == "number":
        return str(rng.randrange(10_000, 100_000))
    return "-".join(rng.sample(WORDS, 3))


def require_choice(value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise InvalidArgument(f"expected one of {', '.join(choices)}; found {value!r}")


def insert_sentences(
    pieces: Sequence[str], sentences: Sequence[str], positions: Sequence[int], facts: Sequence[Fact]
) -> Sample:
    """Return a sample with `sentences[i]` before `pieces[positions[i]]`."""
    sentence_at = dict(zip(positions, sentences, strict=True))
    text = "".join(sentence_at.get(index, "") + piece for index, piece in enumerate(pieces))
    return Sample(text, tuple(facts), positions[0], len(pieces))
