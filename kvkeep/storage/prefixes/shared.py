"""A prefix cache in an object store that several machines share.

As in `store.py`, the cells of a prompt are stored in blocks of 256 tokens. Others may write to the
same store, so a block's key and the code of its content (a MAC) are BLAKE3 hashes keyed by a
secret: only its holders can make a block that verifies, or tell from a key which prompt it is of.
"""

import io
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from blake3 import blake3
from torch import Tensor

from kvkeep.cache.checkpoint import Checkpoint, checkpoint_nbytes
from kvkeep.errors import InvalidArgument, NoObject, StoreError
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.prefixes.block import (
    MAX_COMPARED_BLOCKS,
    BlockCells,
    BlockStream,
    CheckpointNeed,
    PrefixBlock,
    PrefixMatch,
    block_format,
    blocks_of,
    common_prefix_length,
    container_tokens,
    first_difference,
)
from kvkeep.storage.prefixes.checkpoint import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_KIND,
    decode_checkpoint,
    describe_checkpoint,
    encode_checkpoint,
    newest_checkpoint,
)
from kvkeep.storage.prefixes.coding import BlockCoding, BlockCodings
from kvkeep.storage.prefixes.inventory import (
    BLOCK_FORMAT,
    BLOCK_KIND,
    BLOCK_SUFFIX,
    BLOCK_TOKENS,
    CHECKPOINT_SUFFIX,
    owner_key_prefix,
)
from kvkeep.storage.prefixes.write_queue import WriteQueue
from kvkeep.storage.snapshots.container import (
    Container,
    read_container,
    read_open_container,
    write_container,
)
from kvkeep.storage.snapshots.fingerprint import Fingerprint

SECRET_BYTES = 32
_MAX_BLOCK_BYTES = 2_000_000_000  # more than a block of the largest models has
_READ_THREADS = 4  # blocks read at once


class SharedPrefixCache:
    """A prefix cache of one owner, apart from other owners' blocks.

    secret: 32 bytes, known only to the processes that share the cache. arithmetic: the kernels and
    weights that compute cells, by name; others have other keys, since last bits of cells differ.
    queue: shared with the caches of other owners; None for a new one.
    """

    def __init__(
        self,
        store: ObjectStore,
        secret: bytes,
        arithmetic: Mapping[str, str],
        owner: str = "0",
        queue: WriteQueue | None = None,
        codec: str = "exact",
    ):
        """codec: see `PrefixStore`. Raises InvalidArgument for a secret of another length."""
        self._codings, self.codec = BlockCodings(codec), codec
        if len(secret) != SECRET_BYTES:
            raise InvalidArgument(f"a secret must have {SECRET_BYTES} bytes; found {len(secret)}")
        self._store, self._secret, self._arithmetic = store, secret, dict(arithmetic)
        self._queue = queue or WriteQueue()
        self._mac_key = blake3(f"kvkeep prefixes of {owner}".encode(), key=secret).digest()
        self._key_prefix = owner_key_prefix(owner)

    def for_owner(self, owner: str) -> "SharedPrefixCache":
        settings = (self._secret, self._arithmetic, owner, self._queue, self.codec)
        return SharedPrefixCache(self._store, *settings)

    def flush(self) -> None:
        self._queue.flush()

    def find(
        self, fingerprint: Fingerprint, tokens: Sequence[int], need: CheckpointNeed | None = None
    ) -> PrefixMatch:
        """Return the longest prefix that verifies, reading several blocks at once.

        Raises StoreError, and at once if the store has failed recently: prefill would wait for a
        timeout.
        """
        self._queue.require_up()
        coding, checkpoint = self._codings.of(fingerprint), None
        blocks = self._blocks(fingerprint, tokens, coding)
        try:
            hits = self._read_until_miss(blocks, fingerprint, coding)
            missing = blocks[len(hits) :]
            differs_at = first_difference(missing, tokens, self._longest_common_prefix_length)
            stored_tokens = BLOCK_TOKENS * len(hits)
            if need is not None:
                read = partial(self._read_checkpoint, need=need)
                checkpoint = newest_checkpoint(blocks[: len(hits)], need, read)
                del hits[checkpoint.num_tokens // BLOCK_TOKENS if checkpoint else 0 :]
        except StoreError:
            self._queue.mark_down()
            raise
        rounded = "" if coding is None else coding.codec
        return PrefixMatch(hits, differs_at, checkpoint, stored_tokens, rounded)

    def _read_until_miss(
        self,
        blocks: Sequence[PrefixBlock],
        fingerprint: Fingerprint,
        coding: BlockCoding | None,
    ) -> list[BlockCells]:
        hits, read = list[BlockCells](), partial(self._read, fingerprint=fingerprint, coding=coding)
        with ThreadPoolExecutor(_READ_THREADS, "kvkeep-prefix") as readers:
            # The first block is read alone, since most prompts are new and miss at once.
            for batch in (blocks[:1], blocks[1:]):
                for cells in readers.map(read, batch):
                    if cells is None:
                        readers.shutdown(cancel_futures=True)
                        return hits
                    hits.append(cells)
        return hits

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: BlockStream,
        checkpoint: Checkpoint | None = None,
        kept_ends: Collection[int] = (),
    ) -> int:
        """Queue the blocks of a prompt from token `start` on; see `PrefixCache.add`.

        A thread writes them in the background. Stops when the queue is full. Blocks that exist are
        not written again, except the first: the caller's lookup has just missed there, so an
        object in its place does not verify. No checkpoints are removed: that would need a request
        for each block of the prompt. Those that are added are few, and `evict_blocks` bounds them.
        """
        self._queue.require_up()
        coding = self._codings.of(fingerprint)
        stored_end, prompt_blocks = start, self._blocks(fingerprint, tokens, coding)
        new_blocks = prompt_blocks[start // BLOCK_TOKENS :]
        for block, (keys, values) in zip(new_blocks, blocks, strict=False):
            overwrite = block.start == start
            cells = keys.clone(), values.clone()
            write = partial(self._write, block, cells, overwrite, coding)
            if not self._queue.submit(write, keys.nbytes + values.nbytes):
                break
            stored_end = block.end
        if checkpoint is not None and stored_end == checkpoint.num_tokens:
            write = partial(self._write_checkpoint, prompt_blocks[-1], checkpoint)
            self._queue.submit(write, checkpoint_nbytes((checkpoint,)))
        return stored_end

    def _longest_common_prefix_length(self, parent: str, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` a stored child of a block begins with, of a few compared."""
        longest, objects = 0, self._store.list_objects(f"{self._key_prefix}{parent}/")
        children = (info.key for info in objects if info.key.endswith(BLOCK_SUFFIX))
        for key in itertools.islice(children, MAX_COMPARED_BLOCKS):
            path = ObjectPath(self._store, key)
            with suppress(StoreError):
                container = read_container(path, BLOCK_KIND, BLOCK_FORMAT, ("tokens",))
                longest = max(longest, common_prefix_length(container_tokens(container), tokens))
        return longest

    def _blocks(
        self, fingerprint: Fingerprint, tokens: Sequence[int], coding: BlockCoding | None
    ) -> list[PrefixBlock]:
        pairs = "\n".join(f"{name}={value}" for name, value in sorted(self._arithmetic.items()))
        root = self._mac(f"{fingerprint.digest()}\n{pairs}".encode())
        root = root if coding is None else coding.root(root)
        return blocks_of(
            tokens, root, lambda parent, ids: self._mac(parent.encode(), tensor_bytes(ids))
        )

    def _path(self, block: PrefixBlock, suffix: str = BLOCK_SUFFIX) -> ObjectPath:
        key = f"{self._key_prefix}{block.parent}/{block.key}{suffix}"
        return ObjectPath(self._store, key)

    def _read(
        self, block: PrefixBlock, fingerprint: Fingerprint, coding: BlockCoding | None
    ) -> BlockCells | None:
        """Return a block's keys and values; None if it is missing or does not verify."""
        container = self._read_object(self._path(block), BLOCK_KIND, BLOCK_FORMAT)
        if container is None:
            return None
        code = self._content_mac(block, container.tensors, coding)
        if container.document.get("code") != code:
            return None
        return block.cells_from(container, fingerprint, coding)

    def _read_checkpoint(self, block: PrefixBlock, need: CheckpointNeed) -> Checkpoint | None:
        """Return the checkpoint after a block; None if it is missing or does not verify."""
        path = self._path(block, CHECKPOINT_SUFFIX)
        container = self._read_object(path, CHECKPOINT_KIND, CHECKPOINT_FORMAT)
        if container is None:
            return None
        code = self._checkpoint_mac(block, container.document, container.tensors)
        if container.document.get("code") != code:
            return None
        return decode_checkpoint(container, block.end, need)

    def _read_object(self, path: ObjectPath, kind: str, max_format: int) -> Container | None:
        """Return a file that is intact; None if it is not, or missing."""
        try:  # one request for the whole object: blocks are many, and each is small
            content, _ = self._store.get(path.key, _MAX_BLOCK_BYTES)
        except NoObject:
            return None
        try:
            return read_open_container(io.BytesIO(content), path, kind, max_format)
        except StoreError:
            return None

    def _write(
        self, block: PrefixBlock, cells: BlockCells, overwrite: bool, coding: BlockCoding | None
    ) -> None:
        path = self._path(block)
        if overwrite or not path.exists():
            tensors = block.tensors_of(cells, coding)
            document = {"start": block.start, "code": self._content_mac(block, tensors, coding)}
            document |= coding.fields() if coding else {}
            write_container(path, BLOCK_KIND, block_format(coding), document, tensors)

    def _write_checkpoint(self, block: PrefixBlock, checkpoint: Checkpoint) -> None:
        """Write the checkpoint after a block. It replaces one that the caller's lookup missed."""
        document, tensors = encode_checkpoint(checkpoint)
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        document["code"] = self._checkpoint_mac(block, document, tensors)
        path = self._path(block, CHECKPOINT_SUFFIX)
        write_container(path, CHECKPOINT_KIND, CHECKPOINT_FORMAT, document, tensors)

    def _content_mac(
        self, block: PrefixBlock, tensors: Mapping[str, Tensor], coding: BlockCoding | None
    ) -> str:
        """Return the code of a block's cells; "" if it has none. tensors: of its file."""
        if coding is None:
            exact = [tensor_bytes(tensors[name]) for name in ("keys", "values") if name in tensors]
            return self._mac(block.key.encode(), *exact) if len(exact) == 2 else ""
        names = sorted(tensors)
        sizes = json.dumps([(name, tensors[name].nbytes) for name in names]).encode()
        contents = (tensor_bytes(tensors[name]) for name in names)
        chunks = (len(sizes).to_bytes(8, "little"), sizes, *contents)
        return self._mac(b"rounded", block.key.encode(), *chunks)

    def _checkpoint_mac(
        self, block: PrefixBlock, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> str:
        description = describe_checkpoint(document, tensors)
        size = len(description).to_bytes(8, "little")
        contents = (tensor_bytes(tensors[name]) for name in sorted(tensors))
        return self._mac(b"checkpoint", block.key.encode(), size, description, *contents)

    def _mac(self, *chunks: bytes) -> str:
        """Hash chunks with the owner's key. Lengths must be fixed or follow from earlier chunks."""
        hasher = blake3(key=self._mac_key)
        for chunk in chunks:
            hasher.update(chunk)
        return hasher.hexdigest()[:32]
