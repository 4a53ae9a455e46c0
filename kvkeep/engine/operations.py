"""The operation log of an engine, and its totals."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvkeep.engine.record import SessionRecord

T = TypeVar("T")
_LOGGED = 200  # operations of one owner


@dataclass(frozen=True)
class Operation:
    """An operation on a session: `what`, with so many `tokens`, in `seconds`."""

    owner: str
    session: str
    what: str
    revision: int  # of the session afterwards
    tokens: int
    seconds: float
    nbytes: int  # of the session's cells
    when: float = field(default_factory=time.time)  # in seconds since 1970


@dataclass(frozen=True)
class Totals:
    """Counts of an engine since it started, and of its present work."""

    ended: dict[str, int]  # generations by the reason of their end
    prefilled: int  # tokens
    reused: int
    generated: int
    prefill_seconds: float  # of all generations
    decode_seconds: float
    running: int  # generations now
    in_memory: int  # sessions
    on_disk: int
    nbytes: int  # held or reserved
    memory_limit: int


class RecentLog(Generic[T]):
    """The newest entries of each owner, up to a limit."""

    def __init__(self, limit: int):
        self._limit = limit
        self._entries: dict[str, deque[T]] = {}

    def add(self, owner: str, entry: T) -> None:
        self._entries.setdefault(owner, deque(maxlen=self._limit)).append(entry)

    def of(self, owner: str) -> list[T]:
        """Return an owner's entries, the newest first."""
        return list(reversed(self._entries.get(owner, ())))


class OperationLog:
    """The newest operations of each owner, and their listeners. Used in the engine's thread."""

    def __init__(self) -> None:
        self.recent = RecentLog[Operation](_LOGGED)
        self._listeners: list[Callable[[Operation], None]] = []

    def add(self, record: SessionRecord, what: str, tokens: int, seconds: float) -> None:
        """Log an operation and pass it to the listeners. One that raises is removed."""
        nbytes = record.session.cache.nbytes if record.session else 0
        operation = Operation(
            record.owner, record.name, what, record.revision, tokens, seconds, nbytes
        )
        self.recent.add(record.owner, operation)
        for listener in list(self._listeners):
            try:
                listener(operation)
            except Exception:  # it is gone, such as an event loop that has closed
                self._remove(listener)

    def watch(self, listener: Callable[[Operation], None]) -> Callable[[], None]:
        """Add a listener, from any thread; returns a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._remove(listener)

    def _remove(self, listener: Callable[[Operation], None]) -> None:
        with suppress(ValueError):
            self._listeners.remove(listener)
