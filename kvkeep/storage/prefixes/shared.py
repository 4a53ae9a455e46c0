"""Evaluated beginnings of prompts in a store that several machines share.

As in the prefix store of one machine, a prompt's cells lie in blocks of 256 tokens. Here others may
write to the same store: a block's key, and a code over all that is in it, are keyed by a secret
(BLAKE3 with a key), so that only who knows that can make a block that is used, and nobody else can
tell from its name which prompt it is of.
"""

import io
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Literal

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.errors import (
    CorruptFile,
    ForeignFile,
    InvalidArgument,
    NewerFormat,
    NoObject,
    StoreError,
    TruncatedFile,
)
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.paths import ObjectPath, ObjectStatus
from kvkeep.storage.prefixes.block import FORMAT, KIND
from kvkeep.storage.prefixes.interface import PrefixMatch
from kvkeep.storage.prefixes.inventory import BLOCK_SUFFIX, BLOCK_TOKENS, folder_of
from kvkeep.storage.snapshots.container import Container, read_container, write_container
from kvkeep.storage.snapshots.fingerprint import Fingerprint

SECRET = 32  # bytes
NOT_SOUND = (CorruptFile, ForeignFile, NewerFormat, TruncatedFile)
_LARGEST = 2_000_000_000  # bytes of a block of the largest models
_AT_ONCE = 4  # blocks that are read or written at once
_NEAR = 4  # blocks that are looked into for where a prompt differs


class SharedPrefixCache:
    """Blocks of one owner's prompts; no other owner's are found or made.

    secret: 32 bytes that all who share the store know, and nobody else; the owner's own key comes
    of it. arithmetic: of the model (see `LoadedModel`). Cells that another kind of processor has
    computed differ in their last bits, so they are kept apart.
    """

    def __init__(
        self,
        objects: ObjectStore,
        secret: bytes,
        arithmetic: Mapping[str, str],
        owner: str = "0",
        writing: "WriteQueue | None" = None,
    ):
        """writing: that other owners' are written by, too. Raises InvalidArgument for a secret of
        another length."""
        if len(secret) != SECRET:
            raise InvalidArgument(f"a secret has {SECRET} bytes; found {len(secret)}")
        self.objects, self._secret, self._model = objects, secret, dict(arithmetic)
        self._writing = writing or WriteQueue()
        self._key = blake3(f"kvkeep prefixes of {owner}".encode(), key=secret).digest()
        self._prefix = folder_of(owner)
        self._arithmetic = "\n".join(f"{name}={arithmetic[name]}" for name in sorted(arithmetic))

    def of(self, owner: str) -> "SharedPrefixCache":
        """Another owner's, in the same store."""
        return SharedPrefixCache(self.objects, self._secret, self._model, owner, self._writing)

    def flush(self) -> None:
        """Once all that was given is in the store, or could not be."""
        self._writing.flush()

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        """The longest beginning that verifies, in whole blocks, several read at once.

        Where the store has not answered lately it is not asked: whoever reads a prompt would wait.
        """
        self._writing.require_up()
        try:
            return self._find(fingerprint, tokens)
        except StoreError:
            self._writing.is_down()
            raise

    def _find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> PrefixMatch:
        blocks = self._blocks(fingerprint, tokens)
        found: list[tuple[Tensor, Tensor]] = []
        with ThreadPoolExecutor(_AT_ONCE, "kvkeep-prefix") as readers:
            # One that is not there is asked for first, since most prompts are new.
            for part in (blocks[:1], blocks[1:]):
                cells = [readers.submit(self._read, block, fingerprint) for block in part]
                for index, each in enumerate(cells):
                    read = each.result()
                    if read is None:
                        for rest in cells[index:]:
                            rest.cancel()
                        return self._found(found, blocks, tokens)
                    found.append(read)
        return self._found(found, blocks, tokens)

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> int:
        """They are written while whoever gives them goes on; as many as that can wait for. Those
        that are there already are not written again, but for the first: whoever asks has found none
        that verifies in its place."""
        self._writing.require_up()
        first = done = start // BLOCK_TOKENS
        for block, (keys, values) in zip(
            self._blocks(fingerprint, tokens)[done:], blocks, strict=False
        ):
            again = done == first
            if not self._writing.takes(
                partial(self._put, block, keys.clone(), values.clone(), again)
            ):
                break
            done += 1
        return BLOCK_TOKENS * done

    def _found(
        self, cells: list[tuple[Tensor, Tensor]], blocks: "list[_Block]", tokens: Sequence[int]
    ) -> PrefixMatch:
        differs_at = None
        if len(cells) < len(blocks):
            block = blocks[len(cells)]
            differs_at = block.start + self._common(block, tokens[block.start :])
        return PrefixMatch([keys for keys, _ in cells], [values for _, values in cells], differs_at)

    def _common(self, block: "_Block", tokens: Sequence[int]) -> int:
        """How many tokens agree with a block in the place of one that is not there, at best."""
        best = 0
        for stored in itertools.islice(self.objects.list_objects(block.folder), _NEAR):
            place = ObjectPath(self.objects, stored.key)
            with suppress(StoreError):
                found = read_container(place, KIND, FORMAT, ("tokens",)).tensors.get("tokens")
                if found is None or found.shape != (BLOCK_TOKENS,) or found.dtype != torch.int32:
                    continue  # whoever made it knew no better
                pairs = enumerate(zip(found.tolist(), tokens, strict=False))
                differs = (i for i, (theirs, ours) in pairs if theirs != ours)
                best = max(best, next(differs, min(BLOCK_TOKENS, len(tokens))))
        return best

    def _blocks(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> "list[_Block]":
        """The whole blocks of a prompt."""
        root = f"{fingerprint.digest()}\n{self._arithmetic}"
        parent, found = self._digest(root.encode()), []
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            numbers = torch.tensor(
                tokens[end - BLOCK_TOKENS : end], dtype=torch.int32, device="cpu"
            )
            key = self._digest(parent.encode(), tensor_bytes(numbers))
            folder = f"{self._prefix}{parent}/"
            place = ObjectPath(self.objects, f"{folder}{key}{BLOCK_SUFFIX}")
            found.append(_Block(place, folder, key, end - BLOCK_TOKENS, numbers))
            parent = key
        return found

    def _read(self, block: "_Block", fingerprint: Fingerprint) -> tuple[Tensor, Tensor] | None:
        """Its keys and values; None unless who knows the secret wrote it as this very block."""
        try:  # all of it by one request: there are many blocks, and each is small
            content, _ = self.objects.get(block.place.key, _LARGEST)
            found = read_container(_Content(block.key, content), KIND, FORMAT)
        except (NoObject, *NOT_SOUND):  # its tokens are evaluated
            return None
        return self._verified(found, block, fingerprint)

    def _verified(
        self, found: Container, block: "_Block", fingerprint: Fingerprint
    ) -> tuple[Tensor, Tensor] | None:
        tensors = found.tensors
        if not {"tokens", "keys", "values"} <= tensors.keys():
            return None
        tokens, keys, values = (tensors[name] for name in ("tokens", "keys", "values"))
        if tokens.dtype != torch.int32 or not torch.equal(tokens, block.tokens):
            return None
        if not all(fingerprint.describes(t) and t.shape[2] == BLOCK_TOKENS for t in (keys, values)):
            return None
        code = found.document.get("code")
        return (keys, values) if code == self._code(block, keys, values) else None

    def _put(self, block: "_Block", keys: Tensor, values: Tensor, again: bool) -> None:
        if again or not block.place.exists():
            self._write(block, keys, values)

    def _write(self, block: "_Block", keys: Tensor, values: Tensor) -> None:
        document = {"start": block.start, "code": self._code(block, keys, values)}
        tensors = {"tokens": block.tokens, "keys": keys, "values": values}
        write_container(block.place, KIND, FORMAT, document, tensors)

    def _code(self, block: "_Block", keys: Tensor, values: Tensor) -> str:
        return self._digest(block.key.encode(), tensor_bytes(keys), tensor_bytes(values))

    def _digest(self, *parts: bytes) -> str:
        """Of parts whose lengths are told by those before them."""
        hashed = blake3(key=self._key)
        for part in parts:
            hashed.update(part)
        return hashed.hexdigest()[:32]


@dataclass(frozen=True)
class _Content:
    """The bytes of a file, as a place to read them from."""

    stem: str
    content: bytes

    def __str__(self) -> str:
        return f"block {self.stem}"

    def exists(self) -> bool:
        return True

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        return io.BytesIO(self.content)

    def stat(self) -> ObjectStatus:
        return ObjectStatus(len(self.content), 0.0)


@dataclass(frozen=True)
class _Block:
    """One of a prompt's blocks, there or not. folder: of those that may be in its place."""

    place: ObjectPath
    folder: str
    key: str
    start: int
    tokens: Tensor


_MOST_WAITING = 64  # blocks that are still to be written
_DOWN = 30.0  # seconds for which a store that failed is left alone


class WriteQueue:
    """Blocks on their way to a store, and whether it answers."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvkeep-prefixes")
        self._waiting: set[Future[None]] = set()
        self._down_until = 0.0

    def takes(self, write: Callable[[], None]) -> bool:
        """Whether there was room for another, which is written then."""
        if len(self._waiting) >= _MOST_WAITING:
            return False
        work = self._thread.submit(write)
        self._waiting.add(work)
        work.add_done_callback(self._done)
        return True

    def flush(self) -> None:
        wait(list(self._waiting))

    def is_down(self) -> None:
        self._down_until = time.monotonic() + _DOWN

    def require_up(self) -> None:
        """Raises StoreError where the store failed a short while ago."""
        if time.monotonic() < self._down_until:
            raise StoreError(f"the store of prompts failed less than {_DOWN:.0f} seconds ago")

    def _done(self, work: "Future[None]") -> None:
        self._waiting.discard(work)
        if work.exception() is not None:  # it saves work, and nothing depends on it
            self.is_down()
