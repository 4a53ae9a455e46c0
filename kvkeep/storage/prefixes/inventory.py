"""The inventory of a prefix cache, from the names of its files or objects alone.

A block is named after its parent's key and its own: PARENT-KEY.kvblock in a folder, and
prefixes/OWNER/PARENT/KEY.kvblock in an object store. The parent of a prompt's first block is the
digest of its model. So the names form a tree per model, and each leaf is the end of a prompt. A
checkpoint after a block has the block's name with the ending kvcheckpoint.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import StoreError
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.storage.snapshots.header import read_file, read_header

BLOCK_TOKENS = 256
BLOCK_SUFFIX = ".kvblock"
BLOCK_KIND, BLOCK_FORMAT = "prefix-block", 2  # kind and newest format of the files of blocks
CHECKPOINT_SUFFIX = ".kvcheckpoint"
_KEY_PREFIX = "prefixes/"
_READ_THREADS = 16  # headers read at once, of which each takes as long as a request to the store


@dataclass(frozen=True)
class StoredFile:
    """A file or object: the cells of a block, or the checkpoint after it."""

    parent: str  # the key of the block before it, or the digest of the model
    key: str
    is_checkpoint: bool
    location: str  # the path of the file, or its key in an object store
    nbytes: int
    last_used: float  # seconds since 1970; in an object store, when it was written


@dataclass(frozen=True)
class StoredBlock:
    """A block in the store: the cells of 256 tokens of a prompt, and the checkpoint after them."""

    cells: StoredFile
    checkpoint: StoredFile | None = None

    @property
    def parent(self) -> str:
        return self.cells.parent

    @property
    def key(self) -> str:
        return self.cells.key

    @property
    def location(self) -> str:
        return self.cells.location

    @property
    def files(self) -> Sequence[StoredFile]:
        """Its files, in the order in which they are evicted."""
        return (self.cells,) if self.checkpoint is None else (self.checkpoint, self.cells)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def last_used(self) -> float:
        return self.cells.last_used


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt whose last block has no child in the store."""

    blocks: tuple[StoredBlock, ...]  # from the first on
    unshared_blocks: tuple[StoredBlock, ...]  # those of no earlier prompt of the list

    @property
    def token_count(self) -> int:
        return BLOCK_TOKENS * len(self.blocks)

    @property
    def nbytes(self) -> int:
        """The size of its unshared blocks."""
        return sum(block.nbytes for block in self.unshared_blocks)

    @property
    def last_used(self) -> float:
        return self.blocks[-1].last_used

    @property
    def checkpoint_ends(self) -> list[int]:
        """Token counts at which it has a checkpoint, ascending."""
        ends = enumerate(self.blocks, start=1)
        return [index * BLOCK_TOKENS for index, block in ends if block.checkpoint is not None]

    @property
    def model_digest(self) -> str:
        """The digest of its model and settings, and of the codec and basis of rounded cells."""
        return self.blocks[0].parent


@dataclass(frozen=True)
class Rounding:
    """The codec and basis that rounded a prompt's cells.

    codec: "unknown" for files of earlier versions, which do not name it. basis: its digest, or "".
    """

    codec: str
    basis: str


def blocks_of_files(files: Iterable[StoredFile]) -> list[StoredBlock]:
    """Return the blocks of all files. Checkpoints without cells are left out."""
    files = list(files)
    checkpoints = {(file.parent, file.key): file for file in files if file.is_checkpoint}
    all_cells = [file for file in files if not file.is_checkpoint]
    return [StoredBlock(file, checkpoints.get((file.parent, file.key))) for file in all_cells]


def prompts_of(all_blocks: Iterable[StoredBlock]) -> list[StoredPrompt]:
    """Return all prompts, the most recently used first.

    A block that several prompts share counts for the first of them. Blocks whose ancestors are
    missing, which no lookup can reach, appear as prompts of another root.
    """
    blocks_by_key = {block.key: block for block in all_blocks}
    parent_keys = {block.parent for block in blocks_by_key.values()}
    leaves = [block for key, block in blocks_by_key.items() if key not in parent_keys]
    counted_keys, prompts = set[str](), list[StoredPrompt]()
    for leaf in sorted(leaves, key=lambda block: block.last_used, reverse=True):
        chain, block = {leaf.key: leaf}, leaf
        # Forged names may form a circle, so it stops at a block that it has.
        while (parent := blocks_by_key.get(block.parent)) and parent.key not in chain:
            chain[parent.key] = block = parent
        prompt_blocks = tuple(reversed(chain.values()))
        unshared = tuple(block for block in prompt_blocks if block.key not in counted_keys)
        counted_keys |= chain.keys()
        prompts.append(StoredPrompt(prompt_blocks, unshared))
    return prompts


def kept_checkpoint_ends(num_tokens: int, spacing: int) -> list[int]:
    """Return after how many tokens of a prompt the store keeps a checkpoint.

    They are multiples of `spacing`: the last one, and before it those whose distances from it
    double. Of 15 times `spacing` tokens, those after 15, 14, 12 and 8 times. A longer prompt needs
    no other ones among its first tokens, so a prompt that grows drops some, and adds few.
    """
    last, distance, ends = num_tokens // spacing, 1, set[int]()
    if last:
        ends.add(last)
    while distance < last:
        ends.add((last - distance) // distance * distance)
        distance *= 2
    return [spacing * end for end in sorted(ends - {0})]


def surplus_checkpoints(prompts: Sequence[StoredPrompt]) -> list[StoredFile]:
    """Return the checkpoints that no prompt keeps, as each does those near its end or a branch."""
    child_keys = defaultdict[str, set[str]](set)
    for prompt in prompts:
        for block in prompt.blocks:
            child_keys[block.parent].add(block.key)
    kept, checkpoints = set[StoredFile](), dict[StoredFile, None]()
    for prompt in prompts:
        ends = set(kept_checkpoint_ends(prompt.token_count, BLOCK_TOKENS))
        for end, block in enumerate(prompt.blocks, start=1):
            if block.checkpoint is not None:
                checkpoints[block.checkpoint] = None
                if end * BLOCK_TOKENS in ends or len(child_keys[block.key]) > 1:
                    kept.add(block.checkpoint)
    return [checkpoint for checkpoint in checkpoints if checkpoint not in kept]


def stored_prompts(folder: Path) -> list[StoredPrompt]:
    """Return the prompts in the folder of a prefix store. Raises OSError."""
    return prompts_of(blocks_of_files(folder_files(folder))) if folder.is_dir() else []


def folder_files(folder: Path) -> Iterator[StoredFile]:
    """Yield the files of blocks and checkpoints in the folder of a prefix store. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, suffix = os.path.splitext(entry.name)
            parent, _, key = stem.partition("-")
            if suffix not in (BLOCK_SUFFIX, CHECKPOINT_SUFFIX) or not key:
                continue
            with suppress(FileNotFoundError):  # removed by another process meanwhile
                status, is_checkpoint = entry.stat(), suffix == CHECKPOINT_SUFFIX
                size, last_used = status.st_size, status.st_mtime
                yield StoredFile(parent, key, is_checkpoint, entry.path, size, last_used)


def owner_key_prefix(owner: str) -> str:
    """Return the prefix of the keys of an owner's objects."""
    return f"{_KEY_PREFIX}{owner}/"


def stored_objects(store: ObjectStore, owner: str | None = None) -> Iterator[StoredFile]:
    """Yield the objects of one owner, or of all. Raises StoreError."""
    for info in store.list_objects(_KEY_PREFIX if owner is None else owner_key_prefix(owner)):
        *_, parent, name = info.key.split("/")
        key, suffix = os.path.splitext(name)
        if suffix in (BLOCK_SUFFIX, CHECKPOINT_SUFFIX):
            is_checkpoint, last_used = suffix == CHECKPOINT_SUFFIX, info.st_mtime
            yield StoredFile(parent, key, is_checkpoint, info.key, info.st_size, last_used)


def roundings(
    prompts: Iterable[StoredPrompt], path_of: Callable[[str], ReadablePath] = Path
) -> dict[str, Rounding]:
    """Return how prompts with rounded cells were rounded, by their `model_digest`.

    path_of: the path of a location. Reads one header for each `model_digest`, as all its blocks are
    coded alike; more only where files are damaged. Several are read at once.
    """
    prompts_by_digest = defaultdict[str, list[StoredPrompt]](list)
    for prompt in prompts:
        prompts_by_digest[prompt.model_digest].append(prompt)

    def rounding_of(model_prompts: Sequence[StoredPrompt]) -> Rounding | None:
        for block in (block for prompt in model_prompts for block in prompt.blocks):
            with suppress(StoreError):
                return _rounding(path_of(block.location))
        return None

    with ThreadPoolExecutor(_READ_THREADS) as readers:
        found = readers.map(rounding_of, prompts_by_digest.values())
        pairs = zip(prompts_by_digest, found, strict=True)
        return {digest: rounding for digest, rounding in pairs if rounding is not None}


def _rounding(path: ReadablePath) -> Rounding | None:
    """Return how the cells in a block's file were rounded; None if they are exact."""
    header = read_file(path, lambda file: read_header(file, path, BLOCK_KIND, BLOCK_FORMAT))
    if "keys.frames" not in header.extents:
        return None
    names = (header.document.get(name) for name in ("rounded", "basis"))
    # Others may have written the file, and lists print these names.
    codec, basis = (n if isinstance(n, str) and n.isascii() and n.isalnum() else "" for n in names)
    return Rounding(codec or "unknown", basis)


def stored_blocks(store: ObjectStore, owner: str | None = None) -> list[StoredBlock]:
    """Return the blocks of one owner, or of all. Raises StoreError."""
    return blocks_of_files(stored_objects(store, owner))


def evict_blocks(store: ObjectStore, max_bytes: int) -> tuple[int, int]:
    """Evict blocks of all owners down to a total size; return the bytes freed and remaining.

    Checkpoints that `kept_checkpoint_ends` leaves out are evicted first. Then the prompt whose end
    was written first is, from its end, so that the rest of it stays a usable prefix. What killed
    writers left is removed, too, and not counted. Raises StoreError.
    """
    store.sweep_unfinished(_KEY_PREFIX)
    files = list(stored_objects(store))
    prompts = prompts_of(blocks_of_files(files))
    prompt_files = [f for prompt in prompts for block in prompt.blocks for f in block.files]
    reachable = {file.location for file in prompt_files}
    # Checkpoints without cells, and blocks in a circle of forged names, which belong to no prompt,
    # are evicted first.
    eviction_order = [file for file in files if file.location not in reachable]
    surplus = dict.fromkeys(surplus_checkpoints(prompts))
    eviction_order += surplus
    for prompt in reversed(prompts):
        for block in reversed(prompt.unshared_blocks):
            eviction_order += [file for file in block.files if file not in surplus]
    total_bytes, freed_bytes = sum(file.nbytes for file in files), 0
    for file in eviction_order:
        if total_bytes - freed_bytes <= max_bytes:
            break
        store.delete(file.location)
        freed_bytes += file.nbytes
    return freed_bytes, total_bytes - freed_bytes
