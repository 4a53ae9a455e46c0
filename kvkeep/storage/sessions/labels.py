"""Snapshots under labels in a store: each is replaced as a whole, and the last one counts."""

from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects import Objects
from kvkeep.storage.objects.place import ObjectPlace
from kvkeep.storage.sessions.folder import ENDING
from kvkeep.storage.sessions.names import checked_name, is_name


class SharedLabels:
    """One owner's. Nobody holds a label: whoever writes it last has it."""

    def __init__(self, objects: Objects, owner: str):
        self._objects, self._prefix = objects, f"snapshots/{owner}/"

    def path(self, name: str) -> ObjectPlace:
        """Raises InvalidArgument for a name that is none."""
        return ObjectPlace(self._objects, f"{self._prefix}{checked_name(name)}{ENDING}")

    def existing(self, name: str) -> ObjectPlace:
        """Raises InvalidArgument, naming those there are, where there is none."""
        place = self.path(name)
        if not place.exists():
            known = ", ".join(self.names()) or "none yet"
            raise InvalidArgument(f"there is no session {name!r}; expected one of: {known}")
        return place

    def names(self) -> list[str]:
        """In the order of the alphabet."""
        keys = (
            stored.key.removeprefix(self._prefix) for stored in self._objects.listed(self._prefix)
        )
        names = (key.removesuffix(ENDING) for key in keys if key.endswith(ENDING))
        return sorted(name for name in names if is_name(name))

    def remove(self, name: str) -> int:
        """The bytes freed. Raises InvalidArgument where there is none."""
        place = self.existing(name)
        size = place.stat().st_size
        self._objects.delete(place.key)
        return size
