"""The prefix store: evaluated beginnings of prompts, shared by sessions, processes and restarts.

A prompt's cells are kept in blocks of 256 tokens. A block's key is a hash over the model's
fingerprint and every token up to its end, so equal keys mean equal cells. The files are all there
is: their names hold the keys and their times of modification the last use, so that there is no
index to lose.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from filelock import FileLock
from torch import Tensor

from kvkeep.errors import InvalidArgument, StoreError
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
    used longest ago go first. A file that does not verify counts as not there.
    """

    def __init__(self, path: str | Path, max_bytes: int = 2_000_000_000):
        """Raises InvalidArgument for a quota below 1, StoreError for an unusable folder."""
        if max_bytes < 1:
            raise InvalidArgument(f"max_bytes must be 1 or more; found {max_bytes}")
        self.path = Path(path)
        self.max_bytes = max_bytes
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be a prefix store: {error.strerror}") from error
        self._lock = FileLock(self.path / "lock")

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> Found:
        """The longest stored beginning of a prompt, in whole blocks."""
        found = Found([], [], None)
        used: list[Path] = []
        parent = _root(fingerprint)
        for index, block in enumerate(_blocks(tokens)):
            key = _key(parent, block)
            path = self._file(parent, key)
            container = _verified(path, block)
            if container is None:
                differs = index * BLOCK + self._common(parent, tokens[index * BLOCK :])
                found = Found(found.keys, found.values, differs)
                break
            found.keys.append(container.tensors["keys"])
            found.values.append(container.tensors["values"])
            used.append(path)
            parent = key
        # A block is of use only with those before it, which must therefore go after it.
        for path in reversed(used):
            _touch(path)
        return found

    def differs_at(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> tuple[int, int]:
        """How many tokens are stored, and the first at which the nearest stored prompt differs."""
        parent, index = _root(fingerprint), 0
        for block in _blocks(tokens):
            key = _key(parent, block)
            if not self._file(parent, key).exists():
                break
            parent, index = key, index + 1
        return index * BLOCK, index * BLOCK + self._common(parent, tokens[index * BLOCK :])

    def add(
        self, fingerprint: Fingerprint, tokens: Sequence[int], keys: Tensor, values: Tensor
    ) -> bool:
        """Stores the cells of the last 256 of `tokens`, a whole number of blocks.

        keys, values: `[layers, kv_heads, 256, head_dim]`, at the positions of those tokens.
        Returns whether the block is there now; one larger than the quota is not taken.
        """
        parent, key, block = "", _root(fingerprint), tokens[-BLOCK:]
        for earlier in _blocks(tokens):
            parent, key = key, _key(key, earlier)
        path, size = self._file(parent, key), keys.nbytes + values.nbytes + _OVERHEAD
        if size > self.max_bytes:
            return False
        with self._lock:
            if not path.exists():
                self._make_room(size)
                write_container(
                    path,
                    KIND,
                    FORMAT,
                    {"start": len(tokens) - BLOCK},
                    {
                        "keys": keys,
                        "values": values,
                        "tokens": torch.tensor(block, dtype=torch.int32),
                    },
                )
        return True

    def gc(self, max_bytes: int | None = None) -> int:
        """Removes blocks, least recently used first, down to a quota; returns the bytes freed."""
        with self._lock:
            before = self.nbytes
            self._make_room(0, max_bytes)
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all files in the store."""
        return sum(size for _, size, _ in self._files())

    def _make_room(self, size: int, quota: int | None = None) -> None:
        files = sorted(self._files())
        total = sum(length for _, length, _ in files) + size
        for _, length, path in files:
            if total <= (self.max_bytes if quota is None else quota):
                return
            path.unlink(missing_ok=True)
            total -= length

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each block, and of what killed writers left."""
        for entry in os.scandir(self.path):
            if entry.name.endswith(_ENDING):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                yield status.st_mtime_ns, status.st_size, Path(entry.path)

    def _file(self, parent: str, key: str) -> Path:
        return self.path / f"{parent}-{key}{_ENDING}"

    def _common(self, parent: str, tokens: Sequence[int]) -> int:
        """How many of the tokens agree with a block that follows on `parent`, at best."""
        best = 0
        for path in self.path.glob(f"{parent}-*{_ENDING}"):
            container = _verified(path, None)
            if container is not None:
                stored = container.tensors["tokens"].tolist()
                pairs = enumerate(zip(stored, tokens, strict=False))
                agreed = next((i for i, (a, b) in pairs if a != b), min(len(stored), len(tokens)))
                best = max(best, agreed)
        return best


def _root(fingerprint: Fingerprint) -> str:
    return fingerprint.digest()[:32]


def _key(parent: str, block: Sequence[int]) -> str:
    data = parent.encode() + torch.tensor(block, dtype=torch.int32).numpy().tobytes()
    return blake3(data).hexdigest()[:32]


def _blocks(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        yield tokens[end - BLOCK : end]


def _verified(path: Path, tokens: Sequence[int] | None) -> Container | None:
    """The block in a file, if every byte is as it was written and the tokens are those asked."""
    try:
        container = read_container(path, KIND, FORMAT)
    except StoreError:
        return None
    if tokens is not None and container.tensors["tokens"].tolist() != list(tokens):
        return None
    return container


def _touch(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.utime(path)
