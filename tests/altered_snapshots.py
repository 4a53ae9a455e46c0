"""Snapshots with single fields changed, wherever in a snapshot they are."""

from dataclasses import fields, replace
from typing import Any

from kvkeep import Snapshot
from kvkeep.cache import CacheState
from kvkeep.storage.snapshots.memory_state import MemoryState


def altered(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """Return a snapshot with other fields of its own, of its memory or of its cache.

    The cache's time is given as `clock`, its name in `Snapshot`.
    """
    if "clock" in changes:
        changes["time"] = changes.pop("clock")
    memory = _take(changes, MemoryState)
    memory["cache"] = replace(snapshot.memory.cache, **_take(changes, CacheState))
    return replace(snapshot, memory=replace(snapshot.memory, **memory), **changes)


def _take(changes: dict[str, Any], kind: type) -> dict[str, Any]:
    """Remove the changes of a dataclass's fields and return them."""
    names = {field.name for field in fields(kind)} & set(changes)
    return {name: changes.pop(name) for name in names}
