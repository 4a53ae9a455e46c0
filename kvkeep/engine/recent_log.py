"""The newest of what happens, apart for each owner."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentLog(Generic[T]):
    """As many of each owner as `kept` says; older ones are forgotten."""

    def __init__(self, kept: int):
        self._kept = kept
        self._of: dict[str, deque[T]] = {}

    def add(self, owner: str, what: T) -> None:
        self._of.setdefault(owner, deque(maxlen=self._kept)).append(what)

    def of(self, owner: str) -> list[T]:
        """The newest one first."""
        return list(reversed(self._of.get(owner, ())))
