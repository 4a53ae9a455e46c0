"""A proxy for a peer in a worker process."""

import multiprocessing
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.base import About, Forked, Setup, Variant
from benchmarks.peers.worker import serve
from kvkeep.errors import KvkeepError

# Seconds that a worker gets to exit by itself; a busy one does not.
EXIT_TIMEOUT = 5.0
KILL_TIMEOUT = 0.5


class PeerMissing(KvkeepError):
    """A package that the peer needs is not installed, or does not load."""


class PeerFailed(KvkeepError):
    """The peer's process raised an error, or ended."""


class Remote:
    """Implements `Peer` by calls to a worker process, which the constructor starts.

    The constructor raises PeerMissing or PeerFailed; every method may raise PeerFailed.
    """

    def __init__(self, setup: Setup, variant: Variant):
        self.variant = variant
        self.label = variant.label
        # Not forked: a forked process would inherit dead thread pools.
        context = multiprocessing.get_context("spawn")
        self._connection, worker_end = context.Pipe()
        self._process = context.Process(
            target=serve, args=(worker_end, setup, variant), daemon=True
        )
        self._process.start()
        worker_end.close()
        try:
            self._about: About = self._answer("ready")
        except BaseException:
            self.stop(at_once=True)
            raise

    def about(self) -> About:
        return self._about

    def resident(self) -> int:
        """Return the resident bytes of the process."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def open(self, max_tokens: int, forks: int = 0) -> None:
        self._ask("open", max_tokens, forks)

    def open_endless(self, budget: int, keep: int) -> None:
        self._ask("open_endless", budget, keep)

    def close(self) -> None:
        self._ask("close")

    def read(self, ids: list[int]) -> float:
        seconds: float = self._ask("read", ids)
        return seconds

    def write(self, count: int) -> list[float]:
        seconds: list[float] = self._ask("write", count)
        return seconds

    def tokens(self) -> list[int]:
        ids: list[int] = self._ask("tokens")
        return ids

    def save(self, path: Path) -> float:
        seconds: float = self._ask("save", path)
        return seconds

    def restore(self, path: Path) -> float:
        seconds: float = self._ask("restore", path)
        return seconds

    def fork(self) -> Forked:
        seconds: Forked = self._ask("fork")
        return seconds

    def delete(self, start: int, end: int) -> float | None:
        seconds: float | None = self._ask("delete", start, end)
        return seconds

    def held(self) -> int:
        """Return the bytes of memory that the worker holds (`worker._held`)."""
        count: int = self._ask("held")
        return count

    def settle(self) -> None:
        """Free unused memory in the worker, so that `held` counts memory in use."""
        self._ask("settle")

    def stop(self, at_once: bool = False) -> None:
        """Stop the worker. at_once: also while it is busy."""
        self._connection.close()
        self._process.join(KILL_TIMEOUT if at_once else EXIT_TIMEOUT)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise PeerFailed(f"{self.label}: its process ended ({error})") from error
        return self._answer("done")

    def _answer(self, expected: str) -> Any:
        try:
            status, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(EXIT_TIMEOUT)
            raise PeerFailed(
                f"{self.label}: its process ended with status {self._process.exitcode}"
            ) from error
        if status == "missing":
            raise PeerMissing(f"{self.label}: {value}")
        if status != expected:
            raise PeerFailed(f"{self.label}: {value}")
        return value
