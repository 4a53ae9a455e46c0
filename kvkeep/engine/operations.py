"""What was done to sessions lately, and who is told of it."""

from collections.abc import Callable
from contextlib import suppress

from kvkeep.engine.limits import Operation
from kvkeep.engine.recent_log import RecentLog
from kvkeep.engine.record import SessionRecord

_KNOWN = 200  # of one owner


class OperationLog:
    """The newest of each owner, and those who watch. In the engine's thread."""

    def __init__(self) -> None:
        self._recent = RecentLog[Operation](_KNOWN)
        self._listeners: list[Callable[[Operation], None]] = []

    def of(self, owner: str) -> list[Operation]:
        """The last one first."""
        return self._recent.of(owner)

    def add(self, kept: SessionRecord, what: str, tokens: int, seconds: float) -> None:
        """Something was done to a session. A listener that fails is told of nothing more."""
        nbytes = kept.session.cache.nbytes if kept.session else 0
        done = Operation(kept.owner, kept.name, what, kept.revision, tokens, seconds, nbytes)
        self._recent.add(kept.owner, done)
        for listener in list(self._listeners):
            try:
                listener(done)
            except Exception:  # who listens is gone, such as an event loop that has closed
                self._unwatch(listener)

    def watch(self, listener: Callable[[Operation], None]) -> Callable[[], None]:
        """Tells of each from now on; what is returned ends that. From any thread."""
        self._listeners.append(listener)
        return lambda: self._unwatch(listener)

    def _unwatch(self, listener: Callable[[Operation], None]) -> None:
        with suppress(ValueError):
            self._listeners.remove(listener)
