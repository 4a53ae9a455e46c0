"""The workers of one part of a benchmark: who is there, and whose turn it is."""

import time
from collections.abc import Iterator, Sequence
from statistics import median
from types import TracebackType
from typing import Self

from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.remote import PeerFailed, PeerMissing, Remote

# Threads that wait for work spin for a while before they sleep, and would take time from the next.
PAUSE = 0.25  # seconds
WARMING = 64  # tokens


class WorkerPool:
    """Workers that are all there at once, of which one works at a time.

    skipped: gets a line for each variant that does not come up; kvkeep itself must.
    about: gets what each one says of itself.
    patience: seconds; readings that would take a variant longer are left out for it.
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

    def warm_up(self, ids: list[int], most: int, forks: int = 0) -> None:
        """Kernels, thread pools and weights are made ready; contexts of `most` tokens opened."""
        for remote in self.turns(0):
            remote.open(most, forks)
            remote.read(ids[:WARMING])
            remote.open(most, forks)
            self._per_read[remote.label] = remote.read(ids[:WARMING]) / WARMING
            self._per_written[remote.label] = median(remote.write(4))

    def turns(
        self, index: int, reading: int = 0, among: Sequence[Remote] | None = None
    ) -> Iterator[Remote]:
        """Everyone once, or everyone of `among`. Who goes first changes with each `index`.

        reading: tokens that each is about to read; who would lose patience over it is left out.
        """
        present = self.remotes if among is None else among
        able = [each for each in present if self._is_able(each, reading)]
        first = index % len(able) if able else 0
        for remote in able[first:] + able[:first]:
            if self._last not in (None, remote):
                time.sleep(PAUSE)
            self._last = remote
            yield remote

    def writing(self, remote: Remote) -> float:
        """Seconds of a written token, as it was when the worker warmed up."""
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
            f"{remote.label}: to read {reading:,} tokens takes it more than {self._patience:.0f} s"
        )
        return False

    def _note(self, line: str) -> None:
        if line not in self._skipped:
            self._skipped.append(line)

    def _stop(self, at_once: bool) -> None:
        for remote in self.remotes:
            remote.stop(at_once)
        self.remotes.clear()
