"""The files of an engine's sessions: snapshots in a folder, their locks, and markers of changes.

Beside the snapshot of a session lies a small marker file while memory holds a newer revision. An
engine that starts after another was killed finds the marker, and reports what was not saved.
"""

import json
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvkeep.engine.record import SessionRecord
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.sessions.interface import SnapshotStore
from kvkeep.storage.snapshots.snapshot import describe

NOTES = "engine"  # the key of the engine's own fields in a snapshot's notes
_OWNER = re.compile(r"[a-z0-9]{1,64}")
_MARKER_SUFFIX = ".unsaved"
SnapshotLabels = SnapshotStore[Path | ObjectPath]  # one owner's snapshots by label


class SessionFiles:
    """A folder with a subfolder of sessions for each owner.

    unreadable: files that are no valid snapshots, and why. never_saved: owners and names of
    sessions that a killed engine had created and not saved.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._locks: dict[SessionRecord, ExitStack] = {}
        self.unreadable: dict[Path, str] = {}
        self.never_saved: list[tuple[str, str]] = []

    def recover(self) -> list[SessionRecord]:
        """Return a locked record for each session in the folder; none of them is in memory.

        Raises Locked if a running engine uses one of them.
        """
        records: list[SessionRecord] = []
        for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if not (folder.is_dir() and _OWNER.fullmatch(folder.name)):
                continue
            sessions = SessionFolder(folder)
            sessions.sweep()
            names = sessions.names()
            for name in names:
                record = self._recover(folder.name, name, sessions.path(name))
                records += [record] if record else []
            for marker in folder.glob(f"*{_MARKER_SUFFIX}"):
                if marker.stem not in names:
                    self._note_never_saved(sessions, marker)
        return records

    def path(self, owner: str, name: str) -> Path:
        """Return where a session is saved. Raises InvalidArgument for a name that is not valid."""
        return self._of(owner).path(name)

    def snapshots(self, owner: str) -> SnapshotLabels:
        """Return the owner's snapshots by label."""
        return SessionFolder(self._folder / owner / "snapshots")

    def lock(self, record: SessionRecord) -> None:
        """Keep other processes from the session. Raises Locked if one of them uses it."""
        self._locks[record] = stack = ExitStack()
        stack.enter_context(self._of(record.owner).lock(record.name))

    def remove(self, record: SessionRecord, file: Path) -> None:
        """Delete the session's files and unlock it."""
        _marker(file).unlink(missing_ok=True)
        with self._locks.pop(record):
            self._of(record.owner).discard(record.name)

    def unlock_all(self) -> None:
        """Let other processes use the sessions."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def _of(self, owner: str) -> SessionFolder:
        return SessionFolder(self._folder / owner)

    def _recover(self, owner: str, name: str, file: Path) -> SessionRecord | None:
        try:
            notes = describe(file).get("notes", {})
        except StoreError as error:
            self.unreadable[file] = str(error)  # it stays where it is
            return None
        record = SessionRecord(name, owner, True, file, None, notes=other_notes(notes))
        self.lock(record)  # before the marker is read: the engine that holds the lock writes it
        record.resume(notes.get(NOTES, {}))
        marked = _marked_revision(file)
        if marked > record.revision:
            record.lost_revision = marked
        clear_marker(file)
        return record

    def _note_never_saved(self, sessions: SessionFolder, marker: Path) -> None:
        """Note a marker without a snapshot, unless its name is no valid session name."""
        with suppress(InvalidArgument), sessions.lock(marker.stem):
            marker.unlink(missing_ok=True)
            self.never_saved.append((marker.parent.name, marker.stem))


def require_owner(owner: str) -> None:
    """Raise InvalidArgument for an owner that is not valid."""
    if not _OWNER.fullmatch(owner):
        raise InvalidArgument(f"an owner is 1 to 64 of a-z and 0-9; found {owner!r}")


def other_notes(notes: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot's notes without the engine's own."""
    return {key: value for key, value in notes.items() if key != NOTES}


def write_marker(record: SessionRecord, file: Path) -> None:
    """Mark that memory holds a newer revision than the file."""
    text = json.dumps({"revision": record.revision, "tokens": len(record.live.tokens)})
    marker = _marker(file)
    temporary = marker.with_suffix(f"{marker.suffix}.new")
    temporary.write_text(text, encoding="utf-8")  # not synced: for kills, not for power cuts
    temporary.replace(marker)


def clear_marker(file: Path) -> None:
    """Mark that the file holds the newest revision."""
    _marker(file).unlink(missing_ok=True)


def _marker(file: Path) -> Path:
    return file.with_name(f"{file.stem}{_MARKER_SUFFIX}")


def _marked_revision(file: Path) -> int:
    """Return the revision that memory had reached; 0 if all of it was saved."""
    try:
        return int(json.loads(_marker(file).read_text(encoding="utf-8"))["revision"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0
