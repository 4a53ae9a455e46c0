"""A peer in a process of its own, asked as if it were here."""

import multiprocessing
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.base import About, Forked, Setup, Variant
from benchmarks.peers.worker import serve
from kvkeep.errors import KvkeepError

# Seconds that a worker gets to end by itself; one that is in the middle of an answer will not.
PATIENCE = 5.0
BUSY = 0.5


class PeerMissing(KvkeepError):
    """What a peer needs is not installed, or does not load."""


class PeerFailed(KvkeepError):
    """A peer's process raised, or is gone."""


class Remote:
    """The methods of `Peer`, each answered by the worker; it starts as this is made.

    Raises PeerMissing or PeerFailed if it does not come up; every call raises PeerFailed.
    """

    def __init__(self, setup: Setup, variant: Variant):
        self.variant = variant
        self.label = variant.label
        # Not forked: a fork would inherit thread pools that no longer run.
        spawning = multiprocessing.get_context("spawn")
        self._connection, theirs = spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(theirs, setup, variant), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._about: About = self._answer("ready")
        except BaseException:
            self.stop(at_once=True)
            raise

    def about(self) -> About:
        return self._about

    def resident(self) -> int:
        """Bytes of the process that are in memory."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def open(self, most: int, forks: int = 0) -> None:
        self._ask("open", most, forks)

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
        """Bytes of memory that the worker's process holds now."""
        count: int = self._ask("held")
        return count

    def settle(self) -> None:
        """Makes `held` what is in use, as far as the system can tell."""
        self._ask("settle")

    def stop(self, at_once: bool = False) -> None:
        """Ends the worker; at_once: also in the middle of an answer."""
        self._connection.close()
        self._process.join(BUSY if at_once else PATIENCE)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise PeerFailed(f"{self.label}: its process is gone ({error})") from error
        return self._answer("done")

    def _answer(self, expected: str) -> Any:
        try:
            status, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(PATIENCE)
            raise PeerFailed(
                f"{self.label}: its process ended with status {self._process.exitcode}"
            ) from error
        if status == "missing":
            raise PeerMissing(f"{self.label}: {value}")
        if status != expected:
            raise PeerFailed(f"{self.label}: {value}")
        return value
