"""What a list says of a session's file: by its checked header, and without torch."""

from dataclasses import dataclass
from typing import Any

from kvkeep.errors import CorruptFile
from kvkeep.storage.objects.place import Place, place_of
from kvkeep.storage.snapshots.header import SNAPSHOT, SNAPSHOT_FORMAT, read_document


@dataclass(frozen=True)
class Summary:
    """tokens: all of them, those forgotten too. cells: that are held. notes: of whoever kept it."""

    model: str
    policy: str
    max_kv_size: int
    tokens: int
    cells: int
    notes: dict[str, Any]


def summary(path: str | Place) -> Summary:
    """Raises StoreError and its kinds, as `Snapshot.load`; its cells are not looked at."""
    found = read_document(place_of(path), SNAPSHOT, SNAPSHOT_FORMAT)
    try:
        segments = [each for each in found["segments"] if not each.get("local", False)]
        policy = found["policy"]
        says = Summary(
            found["model"],
            policy["name"],
            policy["max_kv_size"],
            found["tokens"],
            sum(each["length"] for each in segments),
            found.get("notes", {}),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise _corrupt(path, error) from error
    kinds = (str, str, int, int, int, dict)
    if [type(value) for value in vars(says).values()] != list(kinds):
        raise _corrupt(path, says)
    return says


def _corrupt(path: str | Place, why: object) -> CorruptFile:
    return CorruptFile(f"{path} is corrupt: no session says this of itself ({why!r:.200})")
