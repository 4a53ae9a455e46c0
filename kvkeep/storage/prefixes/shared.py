"""Evaluated beginnings of prompts in a store that several machines share.

As in the prefix store of one machine, a prompt's cells lie in blocks of 256 tokens. Here others may
write to the same store: a block's key, and a code over all that is in it, are keyed by a secret
(BLAKE3 with a key), so that only who knows that can make a block that is used, and nobody else can
tell from its name which prompt it is of.
"""

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from kvkeep.storage.objects import Objects
from kvkeep.storage.objects.place import ObjectPlace, Seen
from kvkeep.storage.prefixes.block import FORMAT, KIND
from kvkeep.storage.prefixes.interface import Found
from kvkeep.storage.prefixes.names import BLOCK, ENDING
from kvkeep.storage.prefixes.shared_room import folder_of
from kvkeep.storage.prefixes.shared_writing import Writing
from kvkeep.storage.snapshots.container import Container, read_container, write_container
from kvkeep.storage.snapshots.fingerprint import Fingerprint

SECRET = 32  # bytes
NOT_SOUND = (CorruptFile, ForeignFile, NewerFormat, TruncatedFile)
_LARGEST = 2_000_000_000  # bytes of a block of the largest models
_AT_ONCE = 4  # blocks that are read or written at once
_NEAR = 4  # blocks that are looked into for where a prompt differs


class SharedPrefixes:
    """Blocks of one owner's prompts; no other owner's are found or made.

    secret: 32 bytes that all who share the store know, and nobody else; the owner's own key comes
    of it. arithmetic: of the model (see `LoadedModel`). Cells that another kind of processor has
    computed differ in their last bits, so they are kept apart.
    """

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        arithmetic: Mapping[str, str],
        owner: str = "0",
        writing: Writing | None = None,
    ):
        """writing: that other owners' are written by, too. Raises InvalidArgument for a secret of
        another length."""
        if len(secret) != SECRET:
            raise InvalidArgument(f"a secret has {SECRET} bytes; found {len(secret)}")
        self.objects, self._secret, self._model = objects, secret, dict(arithmetic)
        self._writing = writing or Writing()
        self._key = blake3(f"kvkeep prefixes of {owner}".encode(), key=secret).digest()
        self._prefix = folder_of(owner)
        self._arithmetic = "\n".join(f"{name}={arithmetic[name]}" for name in sorted(arithmetic))

    def of(self, owner: str) -> "SharedPrefixes":
        """Another owner's, in the same store."""
        return SharedPrefixes(self.objects, self._secret, self._model, owner, self._writing)

    def flush(self) -> None:
        """Once all that was given is in the store, or could not be."""
        self._writing.flush()

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> Found:
        """The longest beginning that verifies, in whole blocks, several read at once.

        Where the store has not answered lately it is not asked: whoever reads a prompt would wait.
        """
        self._writing.require_up()
        try:
            return self._find(fingerprint, tokens)
        except StoreError:
            self._writing.is_down()
            raise

    def _find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> Found:
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
        first = done = start // BLOCK
        for block, (keys, values) in zip(
            self._blocks(fingerprint, tokens)[done:], blocks, strict=False
        ):
            again = done == first
            if not self._writing.takes(
                partial(self._put, block, keys.clone(), values.clone(), again)
            ):
                break
            done += 1
        return BLOCK * done

    def _found(
        self, cells: list[tuple[Tensor, Tensor]], blocks: "list[_Block]", tokens: Sequence[int]
    ) -> Found:
        differs_at = None
        if len(cells) < len(blocks):
            block = blocks[len(cells)]
            differs_at = block.start + self._common(block, tokens[block.start :])
        return Found([keys for keys, _ in cells], [values for _, values in cells], differs_at)

    def _common(self, block: "_Block", tokens: Sequence[int]) -> int:
        """How many tokens agree with a block in the place of one that is not there, at best."""
        best = 0
        for stored in itertools.islice(self.objects.listed(block.folder), _NEAR):
            place = ObjectPlace(self.objects, stored.key)
            with suppress(StoreError):
                found = read_container(place, KIND, FORMAT, ("tokens",)).tensors.get("tokens")
                if found is None or found.shape != (BLOCK,) or found.dtype != torch.int32:
                    continue  # whoever made it knew no better
                pairs = enumerate(zip(found.tolist(), tokens, strict=False))
                differs = (i for i, (theirs, ours) in pairs if theirs != ours)
                best = max(best, next(differs, min(BLOCK, len(tokens))))
        return best

    def _blocks(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> "list[_Block]":
        """The whole blocks of a prompt."""
        root = f"{fingerprint.digest()}\n{self._arithmetic}"
        parent, found = self._digest(root.encode()), []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            numbers = torch.tensor(tokens[end - BLOCK : end], dtype=torch.int32, device="cpu")
            key = self._digest(parent.encode(), tensor_bytes(numbers))
            folder = f"{self._prefix}{parent}/"
            place = ObjectPlace(self.objects, f"{folder}{key}{ENDING}")
            found.append(_Block(place, folder, key, end - BLOCK, numbers))
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
        if not all(fingerprint.describes(t) and t.shape[2] == BLOCK for t in (keys, values)):
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

    def stat(self) -> Seen:
        return Seen(len(self.content), 0.0)


@dataclass(frozen=True)
class _Block:
    """One of a prompt's blocks, there or not. folder: of those that may be in its place."""

    place: ObjectPlace
    folder: str
    key: str
    start: int
    tokens: Tensor
