"""Made-up facts hidden in a text, and the questions that ask for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.words import WORDS

KEYS = ("number", "words")


@dataclass(frozen=True)
class Fact:
    """sentence: what is hidden. question: ends where the answer begins. answer: the key."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """A text to read, and what is asked of it afterwards.

    asked: in this order. position: of the first of them, among `places` where it could lie.
    foretold: tokens at the end of the text that are not read, but foretold from what was.
    """

    text: str
    asked: tuple[Fact, ...]
    position: int
    places: int
    foretold: int = 0

    @property
    def depth(self) -> float:
        """Of the first fact that is asked for, in percent of the text."""
        return 100 * self.position / max(1, self.places - 1)


class Samples(Protocol):
    """An experiment: as many samples as one likes, the same ones each time."""

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Where:
    """Where the first fact lies: at one place, at depths in turn (in percent), or anywhere."""

    place: int | None = None
    depths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 100]:
            raise InvalidArgument(f"depths must be 0 to 100 percent; found {wrong[0]:g}")

    def places(self, index: int, among: int, count: int, random: Random) -> list[int]:
        """Of `count` sentences, each at a place of its own; the first where it was asked for."""
        first = self._first(index, among, random)
        free = [place for place in range(among) if place != first]
        return [first, *random.sample(free, count - 1)]

    def places_in_order(self, index: int, among: int, count: int, random: Random) -> list[int]:
        """The same, each behind the one before. The first stands where all have room behind it."""
        if self == ANYWHERE:
            return sorted(random.sample(range(among), count))
        first = min(self._first(index, among, random), among - count)
        return [first, *sorted(random.sample(range(first + 1, among), count - 1))]

    def _first(self, index: int, among: int, random: Random) -> int:
        if self.place is not None:
            return self.place
        if self.depths:
            return round(self.depths[index % len(self.depths)] / 100 * (among - 1))
        return random.randrange(among)


ANYWHERE = Where()


def random_of(seed: int, index: int) -> Random:
    """For one sample, whatever other samples are drawn."""
    return Random(f"{seed}/{index}")


def draw_key(kind: str, random: Random) -> str:
    """Five digits, or as "Chewy-Tiger-Amazon"."""
    if kind == "number":
        return str(random.randrange(10_000, 100_000))
    return "-".join(random.sample(WORDS, 3))


def require_known(name: str, known: Iterable[str]) -> None:
    """Raises InvalidArgument for a name that is none of these."""
    if name not in known:
        raise InvalidArgument(f"expected one of {', '.join(known)}; found {name!r}")


def hide(
    pieces: Sequence[str], sentences: Sequence[str], asked: Sequence[Fact], places: Sequence[int]
) -> Sample:
    """Puts each sentence before a piece of its own: the first before piece `places[0]`."""
    before = dict(zip(places, sentences, strict=True))
    text = "".join(before.get(place, "") + piece for place, piece in enumerate(pieces))
    return Sample(text, tuple(asked), places[0], len(pieces))
