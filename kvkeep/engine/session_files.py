"""The files of an engine's sessions: snapshots in a folder, their locks, and markers of changes.

A small marker file lies beside a session's snapshot while memory holds a newer revision. An engine
that starts after another was killed finds the marker, and reports what was not saved.
"""

import json
import re
from contextlib import ExitStack, suppress
from pathlib import Path

from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.sessions.interface import LabelStore

ENGINE_NOTES_KEY = "engine"  # key of the engine's fields in a snapshot's notes
WRITTEN_NOTES_KEY = "answers"  # of these fields: the notes of `WrittenAnswers`
MARKER_SUFFIX = ".unsaved"
_OWNER_PATTERN = re.compile(r"[a-z0-9]{1,64}")
LabelledSnapshots = LabelStore[Path | ObjectPath]  # one owner's snapshots by label


class SessionFile:
    """The snapshot of a session in a folder, its lock, and its marker."""

    def __init__(self, folder: SessionFolder, name: str):
        """Raises InvalidArgument for an invalid name."""
        self.path = folder.path(name)
        self._folder, self._name, self._held_lock = folder, name, ExitStack()
        self._marker = self.path.with_suffix(MARKER_SUFFIX)

    def lock(self) -> None:
        """Lock the session for this process. Raises Locked if another one uses it."""
        self._held_lock.enter_context(self._folder.lock(self._name))

    def unlock(self) -> None:
        self._held_lock.close()

    @property
    def nbytes(self) -> int:
        """The size of the snapshot; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def remove(self) -> None:
        """Delete the snapshot and the marker, and unlock the session."""
        self.clear_marker()
        with self._held_lock:
            self._folder.discard(self._name)

    def write_marker(self, revision: int, token_count: int) -> None:
        """Note on disk that memory holds a newer revision, with so many tokens, than the file."""
        temporary = self._marker.with_suffix(f"{MARKER_SUFFIX}.new")
        text = json.dumps({"revision": revision, "tokens": token_count})
        temporary.write_text(text, encoding="utf-8")  # not synced: for kills, not for power cuts
        temporary.replace(self._marker)

    def clear_marker(self) -> None:
        self._marker.unlink(missing_ok=True)

    def marked_revision(self) -> int:
        """Return the unsaved revision that the marker names; 0 without a marker."""
        try:
            return int(json.loads(self._marker.read_text(encoding="utf-8"))["revision"])
        except (OSError, ValueError, LookupError, TypeError):
            return 0


def owner_folders(folder: Path) -> list[SessionFolder]:
    """Return the folders of sessions in an engine's folder, one for each owner."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [SessionFolder(path) for path in paths if path.is_dir() and is_valid_owner(path.name)]


def remove_orphaned_markers(folder: SessionFolder) -> list[str]:
    """Remove the markers of sessions that were never saved; return the sessions' names."""
    removed_names, saved_names = list[str](), folder.names()
    for marker in folder.root.glob(f"*{MARKER_SUFFIX}"):
        if marker.stem not in saved_names:
            with suppress(InvalidArgument), folder.lock(marker.stem):  # for invalid names
                marker.unlink(missing_ok=True)
                removed_names.append(marker.stem)
    return removed_names


def is_valid_owner(name: str) -> bool:
    return _OWNER_PATTERN.fullmatch(name) is not None
