"""transformers with its DynamicCache."""

import copy
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.peers.base import DTYPE, About, Forked, Setup


class TransformersPeer:
    """Evaluates prompts at once, as `generate` does.

    Its cache cannot evict, so a full endless context evaluates its newest half again.
    """

    def __init__(self, setup: Setup):
        import transformers

        torch.set_num_threads(setup.threads)
        self._library: Any = transformers
        self._library.utils.logging.disable_progress_bar()
        self._library.utils.logging.set_verbosity_error()
        self._device = setup.device
        self._model = self._library.AutoModelForCausalLM.from_pretrained(
            setup.folder, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
        )
        self._model.to(setup.device)
        self.close()

    def about(self) -> About:
        version = f"transformers {self._library.__version__}, torch {torch.__version__}"
        return About(version, f"{DTYPE}, sdpa, DynamicCache")

    def open(self, max_tokens: int, forks: int = 0) -> None:
        self._begin(None)

    def open_endless(self, budget: int, keep: int) -> None:
        self._begin(budget)

    def close(self) -> None:
        self._begin(None)

    def _begin(self, budget: int | None) -> None:
        self._cache: Any = self._library.DynamicCache(config=self._model.config)
        self._tokens: list[int] = []
        self._next = 0
        self._budget = budget

    def read(self, ids: list[int]) -> float:
        start = perf_counter()
        self._evaluate(ids)
        return perf_counter() - start

    def write(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = perf_counter()
            self._evaluate([self._next])
            seconds.append(perf_counter() - start)
        return seconds

    def _evaluate(self, ids: list[int]) -> None:
        if self._budget is not None and len(self._tokens) + len(ids) > self._budget:
            newest = self._tokens[-(self._budget // 2) :]
            self._begin(self._budget)
            ids = [*newest, *ids]
        self._tokens += ids
        with torch.inference_mode():
            inputs = torch.tensor([ids], device=self._device)
            out = self._model(inputs, past_key_values=self._cache, logits_to_keep=1)
            self._next = int(out.logits[0, -1].argmax())

    def tokens(self) -> list[int]:
        return [*self._tokens]

    def save(self, path: Path) -> float:
        start = perf_counter()
        torch.save((self._tokens, self._cache), path)
        return perf_counter() - start

    def restore(self, path: Path) -> float:
        start = perf_counter()
        self._tokens, self._cache = torch.load(path, weights_only=False)
        # A file of keys and values has no logits: the last token is evaluated once more.
        last = self._tokens.pop()
        self._cache.crop(-1)
        self._evaluate([last])
        return perf_counter() - start

    def fork(self) -> Forked:
        saved = self._tokens, self._next
        start = perf_counter()
        cache = copy.deepcopy(self._cache)
        fork_end = perf_counter()
        self._cache, cache = cache, self._cache
        self._tokens = [*self._tokens]
        self._evaluate([self._next])
        token_end = perf_counter()
        self._cache, (self._tokens, self._next) = cache, saved
        return Forked(fork_end - start, token_end - start)

    def delete(self, start: int, end: int) -> float | None:
        return None
