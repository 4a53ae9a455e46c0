"""The states of users' sessions as the users know them, and the results of all users."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvkeep.types import PolicyName

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Content:
    """The tokens of a session, and the status of each ("pinned", "window", ...)."""

    tokens: Tokens
    status: tuple[str, ...]

    @property
    def pinned(self) -> set[int]:
        """Indices of the pinned tokens."""
        return {index for index, status in enumerate(self.status) if status == "pinned"}


Check = Callable[[Content, Content], bool]  # of what a session holds before a change and after it


@dataclass(frozen=True)
class Change:
    """An operation with its arguments, as a replay repeats it."""

    kind: str
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class SessionPoint:
    """A state that a session was in: its content and revision, after a change."""

    content: Content
    revision: int
    change: Change

    @property
    def tokens(self) -> Tokens:
        return self.content.tokens


@dataclass
class UserSession:
    """A session as its user knows it.

    points: from the first. saved: index of the newest that is on disk for certain; -1 for none.
    generation: of the server when the newest point was seen. unanswered: changes of the newest
    point whose responses were lost; one of them may still be made.
    """

    name: str
    word: str
    policy: PolicyName
    points: list[SessionPoint]
    generation: int
    saved: int = -1
    unanswered: list[tuple[Change, Check]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # other than acknowledged changes

    def has(self, kind: str) -> bool:
        """Whether one of its changes is of a kind."""
        return any(point.change.kind == kind for point in self.points)


@dataclass
class Record:
    """The results of all users together."""

    target: int
    done: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    lost: int = 0
    unanswered: int = 0
    replayed: int = 0
    words: dict[str, str] = field(default_factory=dict)  # by word, the owner's key
    answers: dict[str, str] = field(default_factory=dict)  # the first one to each question
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return sum(self.done.values())

    @property
    def is_over(self) -> bool:
        return self.total >= self.target or bool(self.violations)

    def count(self, kind: str) -> None:
        with self.lock:
            self.done[kind] = self.done.get(kind, 0) + 1
