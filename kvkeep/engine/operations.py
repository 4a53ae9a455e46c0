"""The operation log of an engine, and its counts for statistics."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvkeep.engine.latency import Latencies
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.usage import Usage

_MAX_OPERATIONS = 200  # operations of one owner


@dataclass(frozen=True)
class Operation:
    """An operation that changed a session. Its fields are JSON keys of the server."""

    owner: str
    session: str
    what: str  # such as "generate" or "fork"
    revision: int  # of the session afterwards
    tokens: int  # evaluated or added
    seconds: float
    nbytes: int  # of the session's cells
    parent: str | None = None  # name of the session that it was forked from
    when: float = field(default_factory=time.time)  # in seconds since 1970


@dataclass
class Totals:
    """Counts of an engine since it started, and of its present work."""

    ended: Counter[str] = field(default_factory=Counter)  # generations by the reason of their end
    prefilled: int = 0  # tokens
    reused: int = 0
    generated: int = 0
    drafted: int = 0  # tokens of drafts that were tried
    accepted: int = 0  # of these, those that were sampled
    prefill_seconds: float = 0.0  # of all generations
    decode_seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    running: int = 0  # generations now
    waiting: int = 0  # of these, those whose prefill has not begun
    in_memory: int = 0  # sessions
    on_disk: int = 0
    nbytes: int = 0  # held or reserved
    memory_limit: int = 0
    pins: int = 0  # of prefixes, now
    evicted_pins: int = 0  # for lack of memory, before they expired

    def add(self, usage: Usage, prefilled: int, end_reason: str) -> None:
        """Count a generation that ended. prefilled: how many tokens of its prompt were."""
        self.ended[end_reason] += 1
        self.prefilled += prefilled
        self.reused += usage.reuse.tokens
        self.generated += usage.generated
        self.drafted += usage.drafts.drafted
        self.accepted += usage.drafts.accepted
        self.prefill_seconds += usage.prefill_seconds
        self.decode_seconds += usage.decode_seconds
        self.latencies.add(usage)


class OperationLog:
    """Operations that have changed sessions, and their listeners. Used in the engine's thread."""

    def __init__(self) -> None:
        # By owner, the newest first.
        self.recent = defaultdict[str, deque[Operation]](lambda: deque(maxlen=_MAX_OPERATIONS))
        self._listeners: dict[Callable[[Operation], None], None] = {}

    def add(self, record: SessionRecord, kind: str, tokens: int = 0, seconds: float = 0.0) -> None:
        """Log an operation, and call the listeners with it. A listener that raises is removed."""
        if not record.removed:
            record.mark_unsaved()  # each logged operation is a change
        nbytes = record.session.nbytes if record.session else 0
        operation = Operation(
            record.owner,
            record.name,
            kind,
            record.revision,
            tokens,
            seconds,
            nbytes,
            record.parent,
        )
        self.recent[record.owner].appendleft(operation)
        for listener in list(self._listeners):
            try:
                listener(operation)
            except Exception:  # it is gone, such as an event loop that has closed
                self._listeners.pop(listener, None)

    def watch(self, listener: Callable[[Operation], None]) -> Callable[[], None]:
        """Add a listener, from any thread; returns a function that removes it."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)
