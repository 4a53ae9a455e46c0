"""The prefix store: evaluated beginnings of prompts, shared by sessions, processes and restarts.

A prompt's cells are kept in blocks of 256 tokens. A block's key is a hash over the model's
fingerprint and every token up to its end, so equal keys mean equal cells. The files are all there
is: their names hold the keys and their times of modification the last use, so that there is no
index to lose.
"""

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.storage.files.atomic import sweep_temporaries
from kvkeep.storage.prefixes.block import OVERHEAD, PrefixBlock, blocks_of, tokens_in
from kvkeep.storage.prefixes.interface import PrefixMatch
from kvkeep.storage.prefixes.inventory import BLOCK_SUFFIX, BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint

PATIENCE = 5.0  # seconds for which another process may hold the lock


class PrefixStore:
    """Evaluated beginnings of prompts in a folder, within a quota.

    Any number of processes may use one folder. When a new block would exceed the quota, those
    used longest ago go first, but never those that the new one follows on. A file that does not
    verify counts as not there, and is replaced when its tokens are evaluated again.
    """

    def __init__(self, path: str | Path, max_bytes: int = 2_000_000_000):
        """Raises InvalidArgument for a quota below 1, StoreError for an unusable folder."""
        self.path = validation.path("path", path)
        self.max_bytes = validation.whole("max_bytes", max_bytes, 1)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be a prefix store: {error.strerror}") from error
        self._lock = FileLock(self.path / "lock")

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        """The longest stored beginning of a prompt, in whole blocks.

        Raises StoreError where the folder cannot be read.
        """
        keys, values, differs_at = list[Tensor](), list[Tensor](), None
        blocks, parents = blocks_of(self.path, fingerprint, tokens)
        for block in blocks:
            cells = block.read(fingerprint)
            if cells is None:
                rest = tokens[block.start :]
                differs_at = block.start + self._common(parents[len(keys)], rest)
                break
            keys.append(cells[0])
            values.append(cells[1])
        _touch(blocks[: len(keys)])
        return PrefixMatch(keys, values, differs_at)

    def differs_at(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> tuple[int, int]:
        """How many tokens are stored, and the first at which the nearest stored prompt differs.

        Cells are not looked at. Raises StoreError where the folder cannot be read.
        """
        blocks, parents = blocks_of(self.path, fingerprint, tokens)
        here = [tokens_in(block.path) == list(block.tokens) for block in blocks]
        count = here.index(False) if False in here else len(here)
        stored = count * BLOCK_TOKENS
        return stored, stored + self._common(parents[count], tokens[stored:])

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> int:
        """Stores the blocks of a prompt from token `start` on, in one go.

        blocks: keys and values `[layers, kv_heads, 256, head_dim]` of one after another, at the
        positions of their tokens; each is asked for when it is its turn.

        Returns how many tokens of the prompt are there now. Blocks are taken only where all before
        them are there, and until one would not fit beside those.

        Raises InvalidArgument for a start within a block, StoreError where the folder cannot be
        written, Locked where another process has not let go of it for some seconds.
        """
        if validation.whole("start", start, 0) % BLOCK_TOKENS:
            raise InvalidArgument(f"start must be a multiple of {BLOCK_TOKENS}; found {start}")
        all_blocks, _ = blocks_of(self.path, fingerprint, tokens)
        done = all_blocks[: start // BLOCK_TOKENS]
        with self._locked():
            if not all(block.path.exists() for block in done):
                return 0
            sweep_temporaries(self.path)
            room = _Room(self._files(), self.max_bytes, {block.path for block in done})
            for block, cells in zip(all_blocks[len(done) :], blocks, strict=False):
                if not _put(block, fingerprint, *cells, room):
                    break
                done.append(block)
            _touch(done)
        return BLOCK_TOKENS * len(done)

    def gc(self, max_bytes: int | None = None) -> int:
        """Removes blocks, least recently used first, down to a quota; returns the bytes freed.

        Raises InvalidArgument for a quota below 0, StoreError and Locked as `add`.
        """
        asked = validation.optional_whole("max_bytes", max_bytes, 0)
        with self._locked():
            before = self.nbytes
            sweep_temporaries(self.path)
            _Room(self._files(), self.max_bytes if asked is None else asked).make(0)
            return before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the store. Raises StoreError where the folder cannot be read."""
        try:
            return sum(size for _, size, _ in self._files())
        except OSError as error:
            raise self._failed("read", error) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process at a time changes the folder; finding needs no lock."""
        try:
            self._lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise Locked(
                f"another process has been using the prefix store {self.path} for more than "
                f"{PATIENCE:g} seconds"
            ) from None
        except OSError as error:
            raise self._failed("written", error) from error
        try:
            yield
        except OSError as error:
            raise self._failed("written", error) from error
        finally:
            self._lock.release()

    def _failed(self, verb: str, error: OSError) -> StoreError:
        reason = error.strerror or error
        return StoreError(f"the prefix store {self.path} cannot be {verb}: {reason}")

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each block, those being written included."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.name.endswith(BLOCK_SUFFIX) and entry.is_file():
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, self.path / entry.name

    def _common(self, parent: str, tokens: Sequence[int]) -> int:
        """How many of the tokens agree with a block that follows on `parent`, at best."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return 0  # whoever removed the folder emptied the store; the next block makes it anew
        except OSError as error:
            raise self._failed("read", error) from error
        best = 0
        for name in names:
            if name.startswith(f"{parent}-") and name.endswith(BLOCK_SUFFIX):
                stored = tokens_in(self.path / name)
                pairs = enumerate(zip(stored, tokens, strict=False))
                agreed = next((i for i, (a, b) in pairs if a != b), min(len(stored), len(tokens)))
                best = max(best, agreed)
        return best


class _Room:
    """Bytes under a quota; what was used longest ago makes room for more. For use under the lock.

    files: (time of last use, bytes, path) of all that are there. spared: those that stay.
    """

    def __init__(
        self, files: Iterable[tuple[int, int, Path]], quota: int, spared: Collection[Path] = ()
    ):
        oldest_first = sorted(files)
        self._free = quota - sum(size for _, size, _ in oldest_first)
        self._may_go = {path: size for _, size, path in oldest_first if path not in spared}
        self._oldest = deque(self._may_go)
        self._most = self._free + sum(self._may_go.values())

    def make(self, size: int) -> bool:
        """Removes blocks until `size` more bytes fit, if that can be."""
        if size > self._most:
            return False
        while self._free < size:
            path = self._oldest.popleft()
            if path in self._may_go:
                path.unlink(missing_ok=True)
                self._free += self._may_go.pop(path)
        return True

    def spare(self, path: Path) -> None:
        """From now on a file stays, if it is there."""
        self._most -= self._may_go.pop(path, 0)

    def remove(self, path: Path) -> None:
        """Removes a file that is in the way, if there is one."""
        path.unlink(missing_ok=True)
        self._free += self._may_go.pop(path, 0)

    def take(self, size: int) -> None:
        """Counts bytes that were written, and stay."""
        self._free -= size
        self._most -= size


def _put(
    block: PrefixBlock, fingerprint: Fingerprint, keys: Tensor, values: Tensor, room: _Room
) -> bool:
    """Writes a block where it is not there yet; whether it is there now."""
    if block.read(fingerprint) is not None:
        room.spare(block.path)
        return True
    if block.path.exists() and not block.path.is_file():
        return False  # a folder of that name, say: nothing of ours
    room.remove(block.path)
    if not room.make(keys.nbytes + values.nbytes + OVERHEAD):
        return False
    room.take(block.write(keys, values))
    return True


def _touch(blocks: Sequence[PrefixBlock]) -> None:
    """Marks blocks as used now. A block is of use only with those before it, so it goes first."""
    now = time.time_ns()
    for age, block in enumerate(blocks):
        with suppress(OSError):  # removed meanwhile, or a store that may only be read
            os.utime(block.path, ns=(now - age, now - age))
