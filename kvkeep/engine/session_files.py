"""The files of an engine's sessions: snapshots in a folder, their locks, and markers of changes.

Beside the snapshot of a session lies a small marker file while memory holds a newer revision. An
engine that starts after another was killed finds the marker, and reports what was not saved.
"""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.sessions.interface import SnapshotStore

NOTES = "engine"  # the key of the engine's own fields in a snapshot's notes
MARKER_SUFFIX = ".unsaved"
_OWNER = re.compile(r"[a-z0-9]{1,64}")
SnapshotLabels = SnapshotStore[Path | ObjectPath]  # one owner's snapshots by label


class SessionFile:
    """The snapshot of a session in a folder, its lock, and its marker."""

    def __init__(self, folder: SessionFolder, name: str):
        """Raises InvalidArgument for a name that is not valid."""
        self.path = folder.path(name)
        self._folder, self._name, self._lock = folder, name, ExitStack()
        self._marker = self.path.with_suffix(MARKER_SUFFIX)

    def lock(self) -> None:
        """Keep other processes from the session. Raises Locked if one of them uses it."""
        self._lock.enter_context(self._folder.lock(self._name))

    def unlock(self) -> None:
        self._lock.close()

    def remove(self) -> None:
        """Delete the files and unlock the session."""
        self.clear_marker()
        with self._lock:
            self._folder.discard(self._name)

    def write_marker(self, revision: int, tokens: int) -> None:
        """Mark that memory holds a revision that is newer than the file."""
        temporary = self._marker.with_suffix(f"{MARKER_SUFFIX}.new")
        text = json.dumps({"revision": revision, "tokens": tokens})
        temporary.write_text(text, encoding="utf-8")  # not synced: for kills, not for power cuts
        temporary.replace(self._marker)

    def clear_marker(self) -> None:
        """Mark that the file holds the newest revision."""
        self._marker.unlink(missing_ok=True)

    def marked_revision(self) -> int:
        """Return the revision that memory had reached; 0 if all of it was saved."""
        try:
            return int(json.loads(self._marker.read_text(encoding="utf-8"))["revision"])
        except (OSError, ValueError, LookupError, TypeError):
            return 0


def session_folders(folder: Path) -> list[SessionFolder]:
    """Return the subfolders with the sessions of each owner, sorted."""
    owners = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [SessionFolder(path) for path in owners if path.is_dir() and is_owner(path.name)]


def take_orphaned_markers(folder: SessionFolder) -> list[str]:
    """Remove the markers of sessions that a killed engine had never saved; return their names."""
    names, saved = list[str](), folder.names()
    for marker in folder.place.glob(f"*{MARKER_SUFFIX}"):
        if marker.stem not in saved:
            with (
                suppress(InvalidArgument),
                folder.lock(marker.stem),
            ):  # for names that are not valid
                marker.unlink(missing_ok=True)
                names.append(marker.stem)
    return names


def is_owner(name: str) -> bool:
    """Whether a text is a valid name of an owner."""
    return _OWNER.fullmatch(name) is not None


def other_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot's notes without the engine's own."""
    return {key: value for key, value in notes.items() if key != NOTES}
