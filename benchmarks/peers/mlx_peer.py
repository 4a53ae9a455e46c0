"""mlx-lm on Apple's MLX, which also has a CPU build for Linux."""

import copy
import json
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.peers.base import About, Forked, Setup

PREFILL_STEP = 2048  # mlx-lm's own default
KEPT_TOKENS = 4  # first tokens kept by its rotating cache


class MlxPeer:
    """Computes one token ahead, as mlx-lm's `generate_step` does."""

    def __init__(self, setup: Setup):
        import mlx.core
        from mlx_lm.models import cache
        from mlx_lm.utils import load_model

        self._mlx, self._caches = mlx.core, cache
        self._model, _ = load_model(setup.folder)
        self.close()

    def about(self) -> About:
        from importlib.metadata import version

        device = str(self._mlx.default_device())
        return About(f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}", f"{device}, own threads")

    def open(self, max_tokens: int, forks: int = 0) -> None:
        self._begin(None)

    def open_endless(self, budget: int, keep: int) -> None:
        self._begin(budget)

    def close(self) -> None:
        self._begin(None)
        self._mlx.clear_cache()

    def _begin(self, budget: int | None) -> None:
        self._cache: Any = self._caches.make_prompt_cache(self._model, max_kv_size=budget)
        self._tokens: list[int] = []  # all that were evaluated
        self._next: Any = self._mlx.array([0])
        self._budget = budget

    def read(self, ids: list[int]) -> float:
        start = perf_counter()
        *before, last = [
            ids[offset : offset + PREFILL_STEP] for offset in range(0, len(ids), PREFILL_STEP)
        ]
        for step in before:
            self._model(self._mlx.array([step]), cache=self._cache)
            self._mlx.eval([cache.state for cache in self._cache])
        self._next = self._likeliest(self._mlx.array(last))
        self._mlx.eval(self._next)
        self._tokens += ids
        return perf_counter() - start

    def write(self, count: int) -> list[float]:
        seconds = []
        following = self._likeliest(self._next)
        for remaining in reversed(range(count)):
            start = perf_counter()
            self._tokens.append(self._next.item())
            self._next = following
            if remaining:
                following = self._likeliest(self._next)
                self._mlx.async_eval(following)
            self._mlx.eval(self._next)
            seconds.append(perf_counter() - start)
        return seconds

    def _likeliest(self, ids: Any) -> Any:
        """Return the most likely next token `[1]` after ids `[n]`, not computed yet."""
        return self._mlx.argmax(self._model(ids[None], cache=self._cache)[:, -1], axis=-1)

    def tokens(self) -> list[int]:
        if self._budget is None or len(self._tokens) <= self._budget:
            return [*self._tokens]
        return self._tokens[:KEPT_TOKENS] + self._tokens[KEPT_TOKENS - self._budget :]

    def save(self, path: Path) -> float:
        start = perf_counter()
        metadata = {"tokens": json.dumps(self._tokens)}
        self._caches.save_prompt_cache(str(path.with_suffix(".safetensors")), self._cache, metadata)
        return perf_counter() - start

    def restore(self, path: Path) -> float:
        start = perf_counter()
        self._cache, metadata = self._caches.load_prompt_cache(
            str(path.with_suffix(".safetensors")), return_metadata=True
        )
        # The file has no logits: the last token is evaluated once more.
        self._caches.trim_prompt_cache(self._cache, 1)
        self._tokens = json.loads(metadata["tokens"])
        self._next = self._likeliest(self._mlx.array(self._tokens[-1:]))
        self._mlx.eval(self._next)
        return perf_counter() - start

    def fork(self) -> Forked:
        saved = self._cache
        start = perf_counter()
        self._cache = copy.deepcopy(saved)
        self._mlx.eval([cache.state for cache in self._cache])
        fork_end = perf_counter()
        self._mlx.eval(self._likeliest(self._next))
        token_end = perf_counter()
        self._cache = saved
        return Forked(fork_end - start, token_end - start)

    def delete(self, start: int, end: int) -> float | None:
        return None
