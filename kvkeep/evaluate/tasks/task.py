"""What a task is: sentences to hide, and what to ask of who has read them."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvkeep.evaluate.facts import Fact


@dataclass(frozen=True)
class Posed:
    """One drawing of a task.

    sentences: to be hidden, each at a place of its own; each begins with a space. asked: one after
    the other, of the same memory. ordered: the sentences are to be read in this order.
    """

    sentences: tuple[str, ...]
    asked: tuple[Fact, ...]
    ordered: bool = False


class Task(Protocol):
    @property
    def keys(self) -> tuple[str, ...]:
        """Kinds of keys that it can hide; the first is the one where none is asked for."""

    def pose(self, random: Random, keys: str) -> Posed:
        """All that is drawn comes of `random`."""
