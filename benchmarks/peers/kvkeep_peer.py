"""kvkeep itself, as its users call it, with default settings."""

from pathlib import Path
from time import perf_counter

import torch

import kvkeep
from benchmarks.peers.base import DTYPE, About, Forked, Setup
from kvkeep.session.spans import GONE


class KvkeepPeer:
    """Policy "full" where nothing is to be forgotten, "sliding" without end."""

    def __init__(self, setup: Setup):
        torch.set_num_threads(setup.threads)
        self._model = kvkeep.load_model(setup.model, dtype=DTYPE, device=setup.device)
        self._session = self._model.session(policy="full")

    def about(self) -> About:
        version = f"kvkeep {kvkeep.__version__}, torch {torch.__version__}"
        return About(version, f"load_model() with defaults, {DTYPE} cells")

    def open(self, most: int, forks: int = 0) -> None:
        self._session = self._model.session(policy="full")

    def open_endless(self, budget: int, keep: int) -> None:
        self._session = self._model.session(budget, keep)

    def close(self) -> None:
        self._session = self._model.session(policy="full")

    def read(self, ids: list[int]) -> float:
        begun = perf_counter()
        self._session.feed(ids)
        _wait_for(self._session)
        return perf_counter() - begun

    def write(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begun = perf_counter()
            self._session.next_token()
            seconds.append(perf_counter() - begun)
        return seconds

    def tokens(self) -> list[int]:
        seen = zip(self._session.tokens, self._session.token_status, strict=True)
        return [token for token, standing in seen if standing not in GONE]

    def save(self, path: Path) -> float:
        begun = perf_counter()
        self._session.snapshot().save(path)
        return perf_counter() - begun

    def restore(self, path: Path) -> float:
        begun = perf_counter()
        self._session = self._model.restore(kvkeep.Snapshot.load(path))
        _wait_for(self._session)
        return perf_counter() - begun

    def fork(self) -> Forked:
        begun = perf_counter()
        fork = self._session.fork()
        forked = perf_counter()
        fork.next_token()
        return Forked(forked - begun, perf_counter() - begun)

    def delete(self, start: int, end: int) -> float | None:
        begun = perf_counter()
        self._session.delete(start, end)
        _wait_for(self._session)
        return perf_counter() - begun


def _wait_for(session: kvkeep.Session) -> None:
    """Another device may still be computing when a call returns; reading a number waits for it."""
    assert session.logits is not None
    session.logits[0].item()
