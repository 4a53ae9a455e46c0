"""The prefix store: a prefix cache in a folder, shared by sessions and processes across restarts.

The cells of a prompt are stored in blocks of 256 tokens. A block's key is a hash over the model's
fingerprint and all tokens up to the block's end, so equal keys mean equal cells. There is no index
that could be wrong: file names hold the keys, and modification times the last use. After some
blocks there is a checkpoint, in a file of the same name with another ending.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvkeep import validation
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.errors import InvalidArgument, Locked, StoreError
from kvkeep.storage.files.atomic import sweep_temporary_files
from kvkeep.storage.prefixes.block import (
    MAX_COMPARED_BLOCKS,
    BlockCells,
    BlockStream,
    CheckpointNeed,
    PrefixBlock,
    PrefixMatch,
    block_format,
    block_key,
    blocks_of,
    common_prefix_length,
    first_difference,
    read_block,
    read_keyed,
    read_tokens,
)
from kvkeep.storage.prefixes.block_files import BlockFiles, branching_keys
from kvkeep.storage.prefixes.checkpoint import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_KIND,
    decode_checkpoint,
    encode_checkpoint,
    newest_checkpoint,
)
from kvkeep.storage.prefixes.coding import BlockCoding, BlockCodings, block_codec
from kvkeep.storage.prefixes.inventory import (
    BLOCK_KIND,
    BLOCK_TOKENS,
    StoredFile,
)
from kvkeep.storage.prefixes.quota import DEFAULT_MAX_BYTES, Quota
from kvkeep.storage.snapshots.container import write_container
from kvkeep.storage.snapshots.fingerprint import Fingerprint

LOCK_TIMEOUT = 5.0  # seconds to wait for the lock of another process
_MAX_FILE_OVERHEAD = 8192  # bytes that a block's file may need besides its cells
_MAX_TENSOR_OVERHEAD = 512  # and a checkpoint's for each tensor


class PrefixStore:
    """A prefix cache in a folder, within a quota of bytes.

    Any number of processes may use one folder. When a new block would exceed the quota, the least
    recently used blocks are evicted, but never the ancestors of the new one. A file that does not
    verify counts as a miss, and is replaced when its tokens are evaluated again.
    """

    def __init__(self, path: str | Path, max_bytes: int = DEFAULT_MAX_BYTES, codec: str = "exact"):
        """codec: "exact", or "small" or "smaller", which round cells in the basis that `kvkeep
        calibrate` made for the model. Blocks of other codecs are not found.

        Raises InvalidArgument for a quota below 1 or an unknown codec, StoreError for an unusable
        folder.
        """
        self._codings, self.codec = BlockCodings(codec), codec
        self.path = validation.path("path", path)
        self.max_bytes = validation.integer("max_bytes", max_bytes, 1)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be used as a prefix store ({error.strerror}): choose a folder that "
                "can be written"
            ) from error
        self._lock = FileLock(self.path / "lock")
        self._files = BlockFiles(self.path)

    def find(
        self, fingerprint: Fingerprint, tokens: Sequence[int], need: CheckpointNeed | None = None
    ) -> PrefixMatch:
        """Return the longest stored prefix of a prompt. Raises StoreError if it cannot be read."""
        coding, hits, checkpoint = self._coding(fingerprint), list[BlockCells](), None
        blocks = _blocks(fingerprint, tokens, coding)
        for block in blocks:
            cells = self._read(block, fingerprint, coding)
            if cells is None:
                break
            hits.append(cells)
        missing = blocks[len(hits) :]
        differs_at = first_difference(missing, tokens, self._longest_common_prefix_length)
        self._files.mark_used(blocks[: len(hits)])
        stored_tokens = BLOCK_TOKENS * len(hits)
        if need is not None:
            checkpoint = self._newest_checkpoint(blocks[: len(hits)], need)
            del hits[checkpoint.num_tokens // BLOCK_TOKENS if checkpoint else 0 :]
        rounded = "" if coding is None else coding.codec
        return PrefixMatch(hits, differs_at, checkpoint, stored_tokens, rounded)

    def differs_at(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens of a prompt are stored, and where the nearest stored one differs.

        Reads no cells. Raises StoreError if the folder cannot be read.
        """
        coding = self._coding(fingerprint)
        stored_tokens, parent = 0, _root_key(fingerprint, coding)
        for block in _blocks(fingerprint, tokens, coding):
            if read_tokens(self._files.of_cells(block)) != block.tokens.tolist():
                break
            stored_tokens, parent = stored_tokens + BLOCK_TOKENS, block.key
        common_tokens = self._longest_common_prefix_length(parent, tokens[stored_tokens:])
        return stored_tokens, stored_tokens + common_tokens

    def newest_checkpoint_end(
        self, fingerprint: Fingerprint, tokens: Sequence[int], need: CheckpointNeed
    ) -> int:
        """Return after how many of a prompt's tokens its newest usable checkpoint is; 0 for none.

        Reads no cells. tokens: those that are stored.
        """
        blocks = _blocks(fingerprint, tokens, self._coding(fingerprint))
        checkpoint = self._newest_checkpoint(blocks, need)
        return checkpoint.num_tokens if checkpoint else 0

    def add(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        start: int,
        blocks: BlockStream,
        checkpoint: Checkpoint | None = None,
        kept_ends: Collection[int] = (),
    ) -> int:
        """Store the blocks of a prompt from token `start` on, under one lock.

        blocks: consumed lazily, one at a time. checkpoint, kept_ends: see `PrefixCache.add`. Stores
        nothing if an ancestor is missing, and stops at the first block that does not fit in the
        quota beside its ancestors. Raises InvalidArgument for a start within a block, StoreError if
        the folder cannot be written, Locked if another process holds the lock for more than some
        seconds.
        """
        if validation.integer("start", start, 0) % BLOCK_TOKENS:
            raise InvalidArgument(f"start must be a multiple of {BLOCK_TOKENS}; found {start}")
        coding = self._coding(fingerprint)
        prompt_blocks = _blocks(fingerprint, tokens, coding)
        stored_blocks = prompt_blocks[: start // BLOCK_TOKENS]
        with self._locked():
            ancestors = {self._files.of_cells(block) for block in stored_blocks}
            if not all(path.exists() for path in ancestors):
                return 0
            sweep_temporary_files(self.path)
            quota = Quota(self._files.dated(), self.max_bytes, ancestors)
            for block, cells in zip(prompt_blocks[len(stored_blocks) :], blocks, strict=False):
                if not self._put(block, fingerprint, cells, quota, coding):
                    break
                stored_blocks.append(block)
            self._files.mark_used(stored_blocks)
            if checkpoint is not None and stored_blocks[-1:] == prompt_blocks[-1:]:
                self._thin_checkpoints(prompt_blocks, kept_ends, quota)
                self._put_checkpoint(prompt_blocks[-1], checkpoint, quota)
        return BLOCK_TOKENS * len(stored_blocks)

    def gc(self, max_bytes: int | None = None) -> int:
        """Evict the least recently used blocks down to a quota; return the bytes freed.

        max_bytes: None for the store's own quota. Raises InvalidArgument for a quota below 0,
        StoreError and Locked as `add`.
        """
        size_limit = validation.optional_integer("max_bytes", max_bytes, 0)
        with self._locked():
            bytes_before = self.nbytes
            sweep_temporary_files(self.path)
            size_limit = self.max_bytes if size_limit is None else size_limit
            Quota(self._files.dated(), size_limit).make_room(0)
            return bytes_before - self.nbytes

    @property
    def nbytes(self) -> int:
        """Total size of all blocks. Raises StoreError if the folder cannot be read."""
        try:
            return sum(size for _, size, _ in self._files.dated())
        except OSError as error:
            raise self._store_error("read", error) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock for changes of the folder. Lookups need no lock."""
        try:
            with self._lock.acquire(timeout=LOCK_TIMEOUT):
                yield
        except Timeout:
            raise Locked(
                f"another process has been using the prefix store {self.path} for more than "
                f"{LOCK_TIMEOUT:g} seconds"
            ) from None
        except OSError as error:
            raise self._store_error("written", error) from error

    def _store_error(self, verb: str, error: OSError) -> StoreError:
        reason = error.strerror or error
        return StoreError(f"the prefix store {self.path} cannot be {verb}: {reason}")

    def _coding(self, fingerprint: Fingerprint) -> BlockCoding | None:
        return self._codings.of(fingerprint)

    def _read(
        self, block: PrefixBlock, fingerprint: Fingerprint, coding: BlockCoding | None
    ) -> BlockCells | None:
        container = read_block(self._files.of_cells(block), block.key)
        return None if container is None else block.cells_from(container, fingerprint, coding)

    def _put(
        self,
        block: PrefixBlock,
        fingerprint: Fingerprint,
        cells: BlockCells,
        quota: Quota,
        coding: BlockCoding | None,
    ) -> bool:
        """Write a block unless it is stored. Returns False if there is no room for it."""
        path = self._files.of_cells(block)
        container = read_block(path, block.key)
        if container is not None and block.is_of(container, fingerprint, coding):
            quota.pin(path)
            return True
        if path.exists() and not path.is_file():
            return False  # such as a folder of that name, which is not ours to remove
        quota.remove(path)
        tensors = block.tensors_of(cells, coding)
        if not quota.make_room(sum(t.nbytes for t in tensors.values()) + _MAX_FILE_OVERHEAD):
            return False
        document = {"start": block.start, "key": block.key, **(coding.fields() if coding else {})}
        version = block_format(coding)
        quota.free_bytes -= write_container(path, BLOCK_KIND, version, document, tensors)
        return True

    def _newest_checkpoint(
        self, blocks: Sequence[PrefixBlock], need: CheckpointNeed
    ) -> Checkpoint | None:
        """Return the newest checkpoint after one of a prompt's blocks, and mark it as used."""
        checkpoint = newest_checkpoint(blocks, need, lambda x: self._read_checkpoint(x, need))
        if checkpoint is not None:
            self._files.mark_checkpoint_used(blocks[checkpoint.num_tokens // BLOCK_TOKENS - 1])
        return checkpoint

    def _read_checkpoint(self, block: PrefixBlock, need: CheckpointNeed) -> Checkpoint | None:
        path, kind = self._files.of_checkpoint(block), (CHECKPOINT_KIND, CHECKPOINT_FORMAT)
        container = read_keyed(path, block.key, *kind)
        return None if container is None else decode_checkpoint(container, block.end, need)

    def _put_checkpoint(self, block: PrefixBlock, checkpoint: Checkpoint, quota: Quota) -> None:
        """Write the checkpoint after a block, if there is room for it, unless it is stored."""
        path, kind = self._files.of_checkpoint(block), (CHECKPOINT_KIND, CHECKPOINT_FORMAT)
        document, tensors = encode_checkpoint(checkpoint)
        document["key"] = block.key
        stored = read_keyed(path, block.key, *kind)
        if stored is not None and stored.document == document:
            return
        if path.exists() and not path.is_file():
            return  # as in `_put`
        quota.remove(path)
        overhead = _MAX_FILE_OVERHEAD + _MAX_TENSOR_OVERHEAD * len(tensors)
        if quota.make_room(overhead + sum(tensor.nbytes for tensor in tensors.values())):
            quota.free_bytes -= write_container(path, *kind, document, tensors)

    def _thin_checkpoints(
        self, blocks: Sequence[PrefixBlock], kept_ends: Collection[int], quota: Quota
    ) -> None:
        """Remove checkpoints of a prompt other than after `kept_ends`, except where it branches."""
        names = self._files.names()
        branching = branching_keys(names, {block.key for block in blocks})
        for block in blocks:
            path = self._files.of_checkpoint(block)
            is_kept = block.end in kept_ends or block.key in branching
            if not is_kept and path.name in names and path.is_file():
                quota.remove(path)

    def _longest_common_prefix_length(self, parent: str, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` a child of block `parent` begins with, of the newest few."""
        try:
            paths = self._files.newest_children(parent, MAX_COMPARED_BLOCKS)
        except FileNotFoundError:
            return 0  # another process removed the folder; the next block creates it again
        except OSError as error:
            raise self._store_error("read", error) from error
        lengths = (common_prefix_length(read_tokens(path), tokens) for path in paths)
        return max(lengths, default=0)


def stores_of_owners(
    path: str | Path, codec: str, max_bytes: int = DEFAULT_MAX_BYTES
) -> Callable[[str], PrefixStore]:
    """Return a function that opens an owner's prefix store, in a folder of its own in `path`.

    codec: of saved sessions; blocks of others than "small" and "smaller" are stored exactly.
    max_bytes: of each owner. Raises InvalidArgument for a path that is none.
    """
    folder = validation.path("stores", path)
    return lambda owner: PrefixStore(folder / owner, max_bytes, block_codec(codec))


def is_intact(file: StoredFile) -> bool:
    """Whether every byte of a file in a store's folder is as it was written, under its name."""
    path, key = Path(file.location), file.key
    if file.is_checkpoint:
        return read_keyed(path, key, CHECKPOINT_KIND, CHECKPOINT_FORMAT) is not None
    return read_block(path, key) is not None


def _root_key(fingerprint: Fingerprint, coding: BlockCoding | None) -> str:
    """Return the parent key of a prompt's first block: a digest of the model, and of the coding."""
    exact_root = fingerprint.digest()[:32]
    return exact_root if coding is None else coding.root(exact_root)


def _blocks(
    fingerprint: Fingerprint, tokens: Sequence[int], coding: BlockCoding | None
) -> list[PrefixBlock]:
    return blocks_of(tokens, _root_key(fingerprint, coding), block_key)
