"""The worker processes of one part of a benchmark, and the order of their turns."""

import time
from collections.abc import Iterator, Sequence
from statistics import median
from types import TracebackType
from typing import Self

from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.remote import PeerFailed, PeerMissing, Remote

# Idle threads spin before they sleep, and would slow down the next worker.
PAUSE = 0.25  # seconds
WARM_UP_TOKENS = 64  # tokens


class WorkerPool:
    """Workers that all run, of which one is busy at a time.

    skipped: collects a line for each variant that does not start; kvkeep must start. about:
    collects version and settings of each variant. patience: seconds; readings that would take a
    variant longer are skipped for it.
    """

    def __init__(
        self,
        setup: Setup,
        variants: Sequence[Variant],
        skipped: list[str],
        about: dict[str, About],
        patience: float,
    ):
        self.remotes: list[Remote] = []
        self._setup, self._variants = setup, variants
        self._skipped, self._about, self._patience = skipped, about, patience
        # Seconds of one token, by label.
        self._per_read: dict[str, float] = {}
        self._per_written: dict[str, float] = {}
        self._last: Remote | None = None

    def __enter__(self) -> Self:
        try:
            for variant in self._variants:
                self._start(variant)
        except BaseException:
            self._stop(at_once=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(at_once=kind is not None)

    def warm_up(self, ids: list[int], max_tokens: int, forks: int = 0) -> None:
        """Open contexts of `max_tokens`, warm up, and time a few tokens of each worker."""
        for remote in self.turns(0):
            remote.open(max_tokens, forks)
            remote.read(ids[:WARM_UP_TOKENS])
            remote.open(max_tokens, forks)
            self._per_read[remote.label] = remote.read(ids[:WARM_UP_TOKENS]) / WARM_UP_TOKENS
            self._per_written[remote.label] = median(remote.write(4))

    def turns(
        self, index: int, reading: int = 0, among: Sequence[Remote] | None = None
    ) -> Iterator[Remote]:
        """Yield each worker once, or each of `among`; the first one rotates with `index`.

        reading: tokens that each is about to prefill; workers that would exceed `patience` are
        skipped.
        """
        candidates = self.remotes if among is None else among
        ready = [remote for remote in candidates if self._is_able(remote, reading)]
        first = index % len(ready) if ready else 0
        for remote in ready[first:] + ready[:first]:
            if self._last not in (None, remote):
                time.sleep(PAUSE)
            self._last = remote
            yield remote

    def writing(self, remote: Remote) -> float:
        """Return the seconds of a decoded token, as measured by `warm_up`."""
        return self._per_written[remote.label]

    def _start(self, variant: Variant) -> None:
        try:
            remote = Remote(self._setup, variant)
        except (PeerMissing, PeerFailed) as error:
            if variant.peer == "kvkeep":
                raise
            self._note(str(error))
        else:
            self.remotes.append(remote)
            self._about[remote.label] = remote.about()

    def _is_able(self, remote: Remote, reading: int) -> bool:
        if reading * self._per_read.get(remote.label, 0.0) <= self._patience:
            return True
        self._note(
            f"{remote.label}: prefill of {reading:,} tokens takes more than {self._patience:.0f} s"
        )
        return False

    def _note(self, line: str) -> None:
        if line not in self._skipped:
            self._skipped.append(line)

    def _stop(self, at_once: bool) -> None:
        for remote in self.remotes:
            remote.stop(at_once)
        self.remotes.clear()
