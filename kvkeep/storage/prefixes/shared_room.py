"""What a shared store holds of prompts, by the names of its objects alone, and how room is made."""

from collections.abc import Iterator, Sequence

from kvkeep.storage.objects import Objects
from kvkeep.storage.prefixes.names import ENDING, StoredBlock, prompts_of

_ALL = "prefixes/"


def folder_of(owner: str) -> str:
    """Where an owner's blocks lie, each as PARENT/KEY.kvblock."""
    return f"{_ALL}{owner}/"


def stored_blocks(objects: Objects, owner: str | None = None) -> Iterator[StoredBlock]:
    """Of all owners, unless one is named. used: when it was written; a store does not tell when it
    was read. Raises StoreError."""
    for stored in objects.listed(_ALL if owner is None else folder_of(owner)):
        *_, parent, name = stored.key.split("/")
        if name.endswith(ENDING):
            key = name.removesuffix(ENDING)
            yield StoredBlock(parent, key, stored.key, stored.size, stored.modified)


def make_room(objects: Objects, max_bytes: int) -> tuple[int, int]:
    """Removes blocks of all owners' prompts down to a size; the bytes freed, and those left.

    The prompt whose end was written first goes first, from its end: what is left of a prompt can
    be used. Whoever would read one that goes evaluates it anew. Raises StoreError.
    """
    stored = list(stored_blocks(objects))
    total, freed = sum(block.nbytes for block in stored), 0
    for block in _going(stored):
        if total - freed <= max_bytes:
            break
        objects.delete(block.where)
        freed += block.nbytes
    return freed, total - freed


def _going(stored: Sequence[StoredBlock]) -> Iterator[StoredBlock]:
    """All, in order. Those that are of no prompt, which only mischief makes, are the first."""
    prompts = prompts_of(stored)
    of_prompts = {block.where for prompt in prompts for block in prompt.blocks}
    yield from (block for block in stored if block.where not in of_prompts)
    for prompt in reversed(prompts):
        yield from reversed(prompt.blocks[-prompt.own :])
