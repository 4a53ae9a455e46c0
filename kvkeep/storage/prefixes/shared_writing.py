"""Prompts' blocks on their way to a shared store, written while whoever gave them goes on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvkeep.errors import StoreError

_MOST_WAITING = 64  # blocks that are still to be written
_DOWN = 30.0  # seconds for which a store that failed is left alone


class Writing:
    """Blocks on their way to a store, and whether it answers."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvkeep-prefixes")
        self._waiting: set[Future[None]] = set()
        self._down_until = 0.0

    def takes(self, write: Callable[[], None]) -> bool:
        """Whether there was room for another, which is written then."""
        if len(self._waiting) >= _MOST_WAITING:
            return False
        work = self._thread.submit(write)
        self._waiting.add(work)
        work.add_done_callback(self._done)
        return True

    def flush(self) -> None:
        wait(list(self._waiting))

    def is_down(self) -> None:
        self._down_until = time.monotonic() + _DOWN

    def require_up(self) -> None:
        """Raises StoreError where the store failed a short while ago."""
        if time.monotonic() < self._down_until:
            raise StoreError(f"the store of prompts failed less than {_DOWN:.0f} seconds ago")

    def _done(self, work: "Future[None]") -> None:
        self._waiting.discard(work)
        if work.exception() is not None:  # it saves work, and nothing depends on it
            self.is_down()
