"""kvkeep through its public API, with default settings."""

from pathlib import Path
from time import perf_counter

import torch

import kvkeep
from benchmarks.peers.base import DTYPE, About, Forked, Setup
from kvkeep.session.spans import WITHOUT_CELL


class KvkeepPeer:
    """Uses policy "full", or "sliding" for endless contexts."""

    def __init__(self, setup: Setup):
        torch.set_num_threads(setup.threads)
        self._model = kvkeep.load_model(setup.model, dtype=DTYPE, device=setup.device)
        self._session = self._model.session(policy="full")

    def about(self) -> About:
        version = f"kvkeep {kvkeep.__version__}, torch {torch.__version__}"
        return About(version, f"load_model() with defaults, {DTYPE} cells")

    def open(self, max_tokens: int, forks: int = 0) -> None:
        self._session = self._model.session(policy="full")

    def open_endless(self, budget: int, keep: int) -> None:
        self._session = self._model.session(budget, keep)

    def close(self) -> None:
        self._session = self._model.session(policy="full")

    def read(self, ids: list[int]) -> float:
        start = perf_counter()
        self._session.feed(ids)
        _wait_for(self._session)
        return perf_counter() - start

    def write(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = perf_counter()
            self._session.next_token()
            seconds.append(perf_counter() - start)
        return seconds

    def tokens(self) -> list[int]:
        entries = zip(self._session.tokens, self._session.token_status, strict=True)
        return [token for token, status in entries if status not in WITHOUT_CELL]

    def save(self, path: Path) -> float:
        start = perf_counter()
        self._session.snapshot().save(path)
        return perf_counter() - start

    def restore(self, path: Path) -> float:
        start = perf_counter()
        self._session = self._model.restore(kvkeep.Snapshot.load(path))
        _wait_for(self._session)
        return perf_counter() - start

    def fork(self) -> Forked:
        start = perf_counter()
        fork = self._session.fork()
        fork_end = perf_counter()
        fork.next_token()
        return Forked(fork_end - start, perf_counter() - start)

    def delete(self, start: int, end: int) -> float | None:
        begin = perf_counter()
        self._session.delete(start, end)
        _wait_for(self._session)
        return perf_counter() - begin


def _wait_for(session: kvkeep.Session) -> None:
    """Wait for the device: calls may return before it has computed."""
    assert session.logits is not None
    session.logits[0].item()
