"""Ways to restore the KV cache of a long prompt, each timed by its `once`."""

import ctypes
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.codec import Codec
from kvkeep.storage.snapshots.snapshot import Snapshot

Progress = Callable[[int], None]


@dataclass
class Way:
    """Timings of one way.

    bytes: of its file. seconds: of every repeat, by operation ("save", "load", "next_token").
    """

    name: str
    bytes: int | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(operation, []).append(time.perf_counter() - start)


@dataclass(frozen=True)
class Drift:
    """Distance of a restored session from the exact one over the next tokens of the text.

    largest: maximum difference of a logit. kl: mean Kullback-Leibler divergence, in nats.
    """

    tokens: int
    largest: float
    kl: float
    perplexity_exact: float
    perplexity: float


class Kvkeep:
    """kvkeep's snapshots. load: until logits are there; next_token: the first token after that."""

    def __init__(self, model: Model, session: Session, folder: Path, codec: Codec):
        self.way = Way(f"kvkeep, {codec}")
        self._model, self._snapshot, self._codec = model, session.snapshot(), codec
        self._path = folder / f"kvkeep-{codec}.kvkeep"

    def once(self) -> None:
        with self.way.timed("save"):
            self.way.bytes = self._snapshot.save(self._path, self._codec)
        with self.way.timed("load"):
            session = self._model.restore(Snapshot.load(self._path))
            assert session.logits is not None
        with self.way.timed("next_token"):
            session.next_token()


class Copy:
    """A plain copy of the same file with fsync, and a plain read: the cost of the disk alone."""

    def __init__(self, source: Path):
        self.way, self._source = Way("copy and fsync"), source

    def once(self) -> None:
        target = self._source.with_suffix(".copy")
        with self.way.timed("save"), self._source.open("rb") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 22)
            file.flush()
            os.fsync(file.fileno())
        with self.way.timed("load"):
            target.read_bytes()
        self.way.bytes = target.stat().st_size


class Prefill:
    """Evaluation of the prompt from the start."""

    def __init__(self, model: Model, ids: list[int]):
        self.way, self._model, self._ids = Way("evaluate again"), model, ids

    def once(self) -> None:
        session = self._model.session(policy="full")
        with self.way.timed("load"):
            session.feed(self._ids)


class Transformers:
    """transformers' DynamicCache by torch.save and torch.load, without fsync, as users do it.

    It holds no tokens and no logits: load ends with keys and values in memory.
    """

    def __init__(self, session: Session, folder: Path):
        from transformers import DynamicCache

        self.way = Way(f"transformers {version('transformers')} DynamicCache")
        self._path, self._cache = folder / "transformers.pt", DynamicCache()
        cells = session.cache.read(0, session.cache.cells)
        keys, values = (torch.cat([getattr(c, n) for _, c in cells], 2) for n in ("keys", "values"))
        for layer in range(len(keys)):
            self._cache.update(keys[layer : layer + 1], values[layer : layer + 1], layer)

    def once(self) -> None:
        with self.way.timed("save"):
            torch.save(self._cache, self._path)
        with self.way.timed("load"):
            torch.load(self._path, weights_only=False)
        self.way.bytes = self._path.stat().st_size


class LlamaCpp:
    """llama.cpp's session file of the same text; f16 cells, without fsync.

    It holds no logits: next_token is the evaluation that gives them.
    """

    def __init__(self, gguf: Path, tokens: list[int], folder: Path):
        import llama_cpp

        self.way = Way(f"llama-cpp-python {llama_cpp.__version__}")
        self._library, self._tokens = llama_cpp, tokens
        self._path = folder / "llama.session"
        threads = torch.get_num_threads()
        self._llama = llama_cpp.Llama(
            model_path=str(gguf),
            n_ctx=len(tokens) + 64,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        self._llama.eval(tokens)

    def once(self) -> None:
        library, context, count = self._library, self._llama.ctx, len(self._tokens)
        name = str(self._path).encode()
        array = (library.llama_token * count)(*self._tokens)
        with self.way.timed("save"):
            saved = library.llama_state_save_file(context, name, array, count)
        self.way.bytes = self._path.stat().st_size
        restored_count = ctypes.c_size_t()
        with self.way.timed("load"):
            loaded = library.llama_state_load_file(
                context, name, array, count, ctypes.byref(restored_count)
            )
        if not saved or not loaded or restored_count.value != count:
            raise RuntimeError("llama.cpp could not save or load its state")
        self._llama.n_tokens = count
        with self.way.timed("next_token"):
            self._llama.eval(self._tokens[:1])
        self._llama.n_tokens = count


def measure_drift(exact: Session, restored: Session, ids: list[int], done: Progress) -> Drift:
    """Feed both sessions the same tokens one by one, and compare their logits."""
    largest = kl = 0.0
    scores = [0.0, 0.0]
    for token in ids:
        a, b = exact.logits, restored.logits
        assert a is not None
        assert b is not None
        largest = max(largest, float((a - b).abs().max()))
        p, q = (x.double().log_softmax(-1) for x in (a, b))
        kl += float((p.exp() * (p - q)).sum())
        scores = [scores[0] - float(p[token]), scores[1] - float(q[token])]
        exact.feed([token])
        restored.feed([token])
        done(1)
    count = len(ids)
    before, after = (float(torch.tensor(score / count).exp()) for score in scores)
    return Drift(count, largest, kl / count, before, after)


def available_peers(
    session: Session, ids: list[int], folder: Path, gguf: Path | None
) -> tuple[list[Any], list[str]]:
    """Return the installed peers, and the reasons why others are skipped."""
    peers, skipped = list[Any](), list[str]()
    try:
        peers.append(Transformers(session, folder))
    except (ImportError, PackageNotFoundError) as error:
        skipped.append(f"transformers: {error}")
    try:
        if gguf is None:
            skipped.append("llama.cpp: no --gguf given")
        else:
            peers.append(LlamaCpp(gguf, ids, folder))
    except ImportError as error:
        skipped.append(f"llama.cpp: {error}")
    return peers, skipped
