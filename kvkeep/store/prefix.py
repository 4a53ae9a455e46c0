"""The prefix store: evaluated beginnings of prompts, shared by sessions, processes and restarts.

A prompt's cells are kept in blocks of 256 tokens. A block's key is a hash over the model's
fingerprint and every token up to its end, so equal keys mean equal cells. The files are all there
is: their names hold the keys and their times of modification the last use, so that there is no
index to lose.
"""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from filelock import FileLock
from torch import Tensor

from kvkeep import arguments
from kvkeep.errors import StoreError
from kvkeep.store.atomic import sweep
from kvkeep.store.container import Container, read_container, write_container
from kvkeep.store.fingerprint import Fingerprint

BLOCK = 256  # tokens
KIND, FORMAT = "prefix-block", 1
_ENDING = ".kvblock"
_OVERHEAD = 8192  # bytes that a block's file may need beside its cells


@dataclass(frozen=True)
class Found:
    """What a store holds of a prompt.

    keys, values: for each block `[layers, kv_heads, 256, head_dim]`, memory-mapped and verified.
    differs_at: the first token at which the nearest stored prompt goes another way, or ends; None
    where all that could be asked for was found.
    """

    keys: list[Tensor]
    values: list[Tensor]
    differs_at: int | None

    @property
    def tokens(self) -> int:
        return BLOCK * len(self.keys)


class PrefixStore:
    """Evaluated beginnings of prompts in a folder, within a quota.

    Any number of processes may use one folder. When a new block would exceed the quota, those
    used longest ago go first, but never those that the new one follows on. A file that does not
    verify counts as not there, and is replaced when its tokens are evaluated again.
    """

    def __init__(self, path: str | Path, max_bytes: int = 2_000_000_000):
        """Raises InvalidArgument for a quota below 1, StoreError for an unusable folder."""
        self.path = arguments.path("path", path)
        self.max_bytes = arguments.whole("max_bytes", max_bytes, 1)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be a prefix store: {error.strerror}") from error
        self._lock = FileLock(self.path / "lock")

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> Found:
        """The longest stored beginning of a prompt, in whole blocks."""
        keys, values, differs_at = list[Tensor](), list[Tensor](), None
        chain = self._chain(fingerprint, tokens)
        for index, (path, block) in enumerate(chain):
            container = _verified(path, block)
            if container is None:
                start = index * BLOCK
                differs_at = start + self._common(_parent(path), tokens[start:])
                break
            keys.append(container.tensors["keys"])
            values.append(container.tensors["values"])
        _touch([path for path, _ in chain[: len(keys)]])
        return Found(keys, values, differs_at)

    def differs_at(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> tuple[int, int]:
        """How many tokens are stored, and the first at which the nearest stored prompt differs."""
        parent, stored = _root(fingerprint), 0
        for path, _ in self._chain(fingerprint, tokens):
            if not path.exists():
                break
            parent, stored = _key_of(path), stored + BLOCK
        return stored, stored + self._common(parent, tokens[stored:])

    def add(
        self, fingerprint: Fingerprint, tokens: Sequence[int], keys: Tensor, values: Tensor
    ) -> bool:
        """Stores the cells of the last 256 of `tokens`, a whole number of blocks.

        keys, values: `[layers, kv_heads, 256, head_dim]`, at the positions of those tokens.
        Returns whether the block is there now. It is not taken where those before it are not all
        there, or where it would not fit beside them.

        Raises StoreError where the folder cannot be written.
        """
        *before, (path, block) = self._chain(fingerprint, tokens)
        earlier = {each for each, _ in before}
        with self._locked():
            if not all(each.exists() for each in earlier):
                return False
            if _verified(path, block) is None:
                path.unlink(missing_ok=True)
                if not self._make_room(keys.nbytes + values.nbytes + _OVERHEAD, spared=earlier):
                    return False
                self._write(path, block, keys, values, start=len(tokens) - BLOCK)
            _touch([each for each, _ in before] + [path])
        return True

    def gc(self, max_bytes: int | None = None) -> int:
        """Removes blocks, least recently used first, down to a quota; returns the bytes freed."""
        with self._locked():
            before = self.nbytes
            self._make_room(0, quota=max_bytes)
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all files in the store."""
        return sum(size for _, size, _ in self._files())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process at a time changes the folder; finding needs no lock."""
        try:
            with self._lock:
                yield
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"the prefix store {self.path} cannot be written: {reason}") from error

    def _write(
        self, path: Path, block: Sequence[int], keys: Tensor, values: Tensor, start: int
    ) -> None:
        numbers = torch.tensor(block, dtype=torch.int32, device="cpu")
        tensors = {"keys": keys, "values": values, "tokens": numbers}
        write_container(path, KIND, FORMAT, {"start": start}, tensors)

    def _make_room(
        self, size: int, spared: Collection[Path] = (), quota: int | None = None
    ) -> bool:
        """Removes blocks until `size` more bytes fit, if that can be. Call it under the lock."""
        sweep(self.path)
        files = sorted(each for each in self._files() if each[2] not in spared)
        most = self.max_bytes if quota is None else quota
        excess = self.nbytes + size - most
        if excess > sum(length for _, length, _ in files):
            return False
        for _, length, path in files:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= length
        return True

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each block, those being written included."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.name.endswith(_ENDING):
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, self.path / entry.name

    def _chain(
        self, fingerprint: Fingerprint, tokens: Sequence[int]
    ) -> list[tuple[Path, Sequence[int]]]:
        """The file and the tokens of each whole block of a prompt."""
        parent, chain = _root(fingerprint), []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            block = tokens[end - BLOCK : end]
            key = _key(parent, block)
            chain.append((self.path / f"{parent}-{key}{_ENDING}", block))
            parent = key
        return chain

    def _common(self, parent: str, tokens: Sequence[int]) -> int:
        """How many of the tokens agree with a block that follows on `parent`, at best."""
        best = 0
        for path in self.path.glob(f"{parent}-*{_ENDING}"):
            stored = _stored_tokens(path)
            pairs = enumerate(zip(stored, tokens, strict=False))
            agreed = next((i for i, (a, b) in pairs if a != b), min(len(stored), len(tokens)))
            best = max(best, agreed)
        return best


def _root(fingerprint: Fingerprint) -> str:
    return fingerprint.digest()[:32]


def _key(parent: str, block: Sequence[int]) -> str:
    numbers = torch.tensor(block, dtype=torch.int32, device="cpu")
    data = parent.encode() + numbers.numpy().tobytes()
    return blake3(data).hexdigest()[:32]


def _parent(path: Path) -> str:
    return path.stem.split("-")[0]


def _key_of(path: Path) -> str:
    return path.stem.split("-")[1]


def _verified(path: Path, tokens: Sequence[int]) -> Container | None:
    """The block in a file, if every byte is as it was written and the tokens are those asked."""
    try:
        container = read_container(path, KIND, FORMAT)
    except StoreError:
        return None
    return container if container.tensors["tokens"].tolist() == list(tokens) else None


def _stored_tokens(path: Path) -> list[int]:
    """The tokens of a block, without a look at its cells; none if they do not verify."""
    try:
        container = read_container(path, KIND, FORMAT, only=("tokens",))
    except StoreError:
        return []
    return list[int](container.tensors["tokens"].tolist())


def _touch(chain: Sequence[Path]) -> None:
    """Marks blocks as used now. A block is of use only with those before it, so it goes first."""
    now = time.time_ns()
    for age, path in enumerate(chain):
        with suppress(OSError):  # removed meanwhile, or a store that may only be read
            os.utime(path, ns=(now - age, now - age))
