"""Records of the sessions of simulated users, and the results of all users."""

import threading
from dataclasses import dataclass, field

from kvkeep.types import PolicyName

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Content:
    """The tokens of a session, the status of each ("pinned", "window", ...), and its cells."""

    tokens: Tokens
    status: tuple[str, ...]
    cells: int


@dataclass(frozen=True)
class Change:
    """An operation with its arguments, as a replay repeats it.

    start, end: the range of tokens that it changes or removes. tokens: that it puts at `start`, or
    makes the whole text. max_answer: the most tokens that are generated after those. end_ids: of
    the tokens that end the answer. answer: without such a token, as the response has it; None if
    there was no response.
    """

    kind: str
    start: int = 0
    end: int = 0
    tokens: Tokens = ()
    max_answer: int = 0
    end_ids: Tokens = ()
    answer: Tokens | None = None


@dataclass(frozen=True)
class Found:
    """A session as its server shows it."""

    content: Content
    text: str
    revision: int


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
    """The record of a session: what its user sent and received.

    points: from the first. generation: of the server when the newest point was seen. saved: index
    of the newest point that is on disk for certain; -1 for none. saved_revision: on disk for
    certain. origin: index of the first point of this session itself, and not of its parent.
    unanswered: changes of the newest point whose responses were lost; one of them may still be
    made.
    """

    name: str
    word: str
    policy: PolicyName
    points: list[SessionPoint]
    generation: int
    saved: int = -1
    saved_revision: int = -1
    origin: int = 0
    unanswered: list[Change] = field(default_factory=list)
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
    answers: dict[str, object] = field(default_factory=dict)  # the first one to each question
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

    def first_answer(self, question: str, answer: object) -> object:
        """Return the first answer to a question, which all others must equal."""
        with self.lock:
            return self.answers.setdefault(question, answer)

    def strangers(self, text: str, own_word: str = "") -> list[str]:
        """Return the words in a text that belong to sessions with other words."""
        with self.lock:
            return [word for word in self.words if word != own_word and word in text]
