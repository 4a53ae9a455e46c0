"""Background writes to a shared prefix store, bounded in bytes."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvkeep.errors import StoreError

MAX_QUEUED_BYTES = 256_000_000  # of the cells that wait to be written
_BACKOFF = 30.0  # seconds without requests after a failure of the store


class WriteQueue:
    """A queue of background writes to a store, and a circuit breaker after failures.

    max_bytes: the most that waiting writes hold; a larger write waits alone.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._writer = ThreadPoolExecutor(1, "kvkeep-prefixes")
        self._lock, self._max_bytes, self._queued_bytes = threading.Lock(), max_bytes, 0
        self._down_until = 0.0

    def submit(self, write: Callable[[], None], nbytes: int) -> bool:
        """Queue a write, which holds `nbytes`. Returns False if the queue is full."""
        with self._lock:
            if self._queued_bytes and self._queued_bytes + nbytes > self._max_bytes:
                return False
            self._queued_bytes += nbytes
        self._writer.submit(write).add_done_callback(partial(self._on_write_done, nbytes))
        return True

    def flush(self) -> None:
        """Wait until all queued writes have ended."""
        self._writer.submit(lambda: None).result()  # writes run one after the other

    def mark_down(self) -> None:
        """Pause requests after a failure of the store."""
        self._down_until = time.monotonic() + _BACKOFF

    def require_up(self) -> None:
        """Raise StoreError if the store has failed recently."""
        if time.monotonic() < self._down_until:
            raise StoreError(f"the shared prefix store failed less than {_BACKOFF:.0f} seconds ago")

    def _on_write_done(self, nbytes: int, future: "Future[None]") -> None:
        with self._lock:
            self._queued_bytes -= nbytes
        if future.exception() is not None:  # not reported: no session depends on the cache
            self.mark_down()
