"""Seconds that operations take, and how long after a fault they are normal again."""

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

MAX_RECOVERY_SECONDS = 60.0
_FACTOR = 10  # of the median, up to which a time is normal
_LEAST_SECONDS = 2.0  # normal on a machine that does other work
_KEPT = 1_000  # newest operations, for the median
_POLL_SECONDS = 0.05


class Latencies:
    """The operations of all users. Times are those of time.monotonic().

    recoveries: seconds from the end of each fault until every user was answered in a normal time.
    """

    def __init__(self, users: int) -> None:
        self._seconds = deque[float](maxlen=_KEPT)
        self._newest: list[deque[tuple[float, float]]] = [deque(maxlen=_KEPT) for _ in range(users)]
        self._lock = threading.Lock()
        self.recoveries = list[float]()

    def add(self, user: int, seconds: float) -> None:
        """Add an operation that has just ended."""
        with self._lock:
            self._seconds.append(seconds)
            self._newest[user].append((time.monotonic(), seconds))

    def normal_seconds(self) -> float:
        """Return the longest time that is normal, as far as is known by now."""
        with self._lock:
            return max(_LEAST_SECONDS, _FACTOR * median(self._seconds or [0.0]))

    def recovery(self, since: float, normal: float) -> float:
        """Return the seconds from a fault's end until the last user's first normal operation.

        Infinite if a user has had none yet. Of one that began earlier, the time since then counts.
        """
        with self._lock:
            return max(
                next(
                    (end - since for end, took in ends if 0 <= min(took, end - since) <= normal),
                    float("inf"),
                )
                for ends in self._newest
            )

    def wait_for_recovery(self, normal: float, is_over: Callable[[], bool]) -> bool:
        """Wait after a fault until all users have recovered. False if that takes too long."""
        since = time.monotonic()
        while time.monotonic() < since + MAX_RECOVERY_SECONDS:
            seconds = self.recovery(since, normal)
            if seconds < float("inf"):
                self.recoveries.append(round(seconds, 2))
                return True
            if is_over():
                return True
            time.sleep(_POLL_SECONDS)
        return False
