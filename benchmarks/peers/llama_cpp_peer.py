"""llama.cpp through llama-cpp-python's bindings of the C library, without the wrapper's cost."""

import ctypes
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.peers.base import About, Forked, Setup
from benchmarks.peers.llama_library import load_library
from kvkeep.errors import ModelError

UBATCH_TOKENS = 512  # n_ubatch, llama.cpp's own default


class LlamaCppPeer:
    """Uses flash attention. A full endless context is shifted: half of its unkept tokens go."""

    program, package = "llama.cpp", "llama-cpp-python"

    def __init__(self, setup: Setup, file: Path, libraries: Path | None = None):
        self._library = library = self._load(libraries)
        self._threads, self._file = setup.threads, file
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise ModelError(f"{self.program} cannot read {file}")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape = (0, 0)
        self._begin(None, 0)

    def _load(self, libraries: Path | None) -> Any:
        return load_library(libraries)

    def about(self) -> About:
        features = self._library.llama_print_system_info().decode().strip(" |")
        size = self._file.stat().st_size / 1e6
        how = f"{size:.0f} MB, f16 cells, flash attention; {features}"
        return About(f"{self.package} {self._library.__version__}", how)

    def open(self, max_tokens: int, forks: int = 0) -> None:
        if self._shape[0] < max_tokens or self._shape[1] != forks:
            self._make_context(max_tokens, forks)
        self._library.llama_memory_clear(self._memory, False)
        self._begin(None, 0)

    def open_endless(self, budget: int, keep: int) -> None:
        self._make_context(budget, 0)
        self._begin(budget, keep)

    def close(self) -> None:
        if self._context is not None:
            self._library.llama_free(self._context)
        self._context, self._shape = None, (0, 0)

    def _make_context(self, cells: int, forks: int) -> None:
        self.close()
        library = self._library
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = cells
        params.n_ubatch = min(UBATCH_TOKENS, cells)
        params.n_threads = params.n_threads_batch = self._threads
        params.n_seq_max = 1 + forks
        # One pool of cells, so that a fork shares them; older versions always have one.
        for name, value in (("kv_unified", True), ("flash_attn_type", 1), ("flash_attn", True)):
            if name in dict(params._fields_):
                setattr(params, name, value)
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelError(f"{self.program} cannot make a context of {cells} cells")
        self._shape = (cells, forks)
        self._memory = library.llama_get_memory(self._context)

    def _begin(self, budget: int | None, keep: int) -> None:
        self._tokens: list[int] = []  # that are in the context, in their order
        self._next = 0
        self._budget, self._keep = budget, keep

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
            self._shift()
        array = _array(self._library, ids)  # held here: a batch only points to it
        self._decode(self._batch(array))
        self._tokens += ids
        self._next = self._likeliest()

    def _batch(self, array: Any) -> Any:
        """Return a batch of tokens that follow those in the context."""
        return self._library.llama_batch_get_one(array, len(array))

    def _shift(self) -> None:
        """Shift the context as llama.cpp's own programs do."""
        count = len(self._tokens)
        discarded = (count - self._keep) // 2
        self._take_out(self._keep, self._keep + discarded)

    def _take_out(self, start: int, end: int) -> None:
        library, memory = self._library, self._memory
        if not library.llama_memory_seq_rm(memory, 0, start, end):
            raise ModelError(f"{self.program} cannot take tokens out of this context")
        library.llama_memory_seq_add(memory, 0, end, -1, start - end)
        del self._tokens[start:end]

    def _decode(self, batch: Any) -> None:
        if status := self._library.llama_decode(self._context, batch):
            raise ModelError(f"llama_decode ended with {status}")

    def _likeliest(self) -> int:
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())

    def tokens(self) -> list[int]:
        return [*self._tokens]

    def save(self, path: Path) -> float:
        library, count = self._library, len(self._tokens)
        start = perf_counter()
        array = _array(library, self._tokens)
        if not library.llama_state_save_file(self._context, str(path).encode(), array, count):
            raise ModelError(f"{self.program} could not save its state")
        return perf_counter() - start

    def restore(self, path: Path) -> float:
        library, max_tokens = self._library, self._shape[0]
        count, array = ctypes.c_size_t(), (library.llama_token * max_tokens)()
        start = perf_counter()
        if not library.llama_state_load_file(
            self._context, str(path).encode(), array, max_tokens, ctypes.byref(count)
        ):
            raise ModelError(f"{self.program} could not load its state")
        self._tokens = list(array[: count.value])
        self._evaluate_last_again()  # the file has no logits
        return perf_counter() - start

    def fork(self) -> Forked:
        library = self._library
        start = perf_counter()
        library.llama_memory_seq_cp(self._memory, 0, 1, -1, -1)
        fork_end = perf_counter()
        self._decode_in_fork(self._next)
        self._likeliest()
        token_end = perf_counter()
        library.llama_memory_seq_rm(self._memory, 1, -1, -1)
        return Forked(fork_end - start, token_end - start)

    def _decode_in_fork(self, token: int) -> None:
        batch = self._library.llama_batch_init(1, 0, 1)
        try:
            batch.n_tokens = 1
            batch.token[0], batch.pos[0] = token, len(self._tokens)
            batch.n_seq_id[0], batch.seq_id[0][0] = 1, 1
            batch.logits[0] = True
            self._decode(batch)
        finally:
            self._library.llama_batch_free(batch)

    def delete(self, start: int, end: int) -> float | None:
        begin = perf_counter()
        self._take_out(start, end)
        self._evaluate_last_again()
        return perf_counter() - begin

    def _evaluate_last_again(self) -> None:
        last = self._tokens.pop()
        self._library.llama_memory_seq_rm(self._memory, 0, len(self._tokens), -1)
        self._evaluate([last])


def _array(library: Any, ids: list[int]) -> Any:
    return (library.llama_token * len(ids))(*ids)
