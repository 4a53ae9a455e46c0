"""The files of an engine's sessions: snapshots in a folder, and markers of changes.

A small marker file lies beside a session's snapshot while memory holds a newer revision. An engine
that starts after another was killed finds the marker, and reports what was not saved. The marker of
a session that is on disk only has what changed beside its text, such as the title: nothing of that
is lost.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.sessions.interface import LabelStore, is_valid_name

ENGINE_NOTES_KEY = "engine"  # key of the engine's fields in a snapshot's notes
WRITTEN_NOTES_KEY = "answers"  # of these fields: the notes of `WrittenAnswers`
MARKER_SUFFIX = ".unsaved"
_OWN_FIELDS = ("name", "used", "created", "parent", "pinned", "title", "changed")  # not of the text
_FIELDS_OF_A_NAME = ("name", "revision", "used", "pinned", "parent")
_OWNER_PATTERN = re.compile(r"[a-z0-9]{1,64}")
LabelledSnapshots = LabelStore[Path | ObjectPath]  # one owner's snapshots by label


def notes_after_change(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot's notes for a session that was changed outside an engine.

    The revision grows, and what the engine noted about the text is left out.
    """
    if ENGINE_NOTES_KEY not in notes:
        return dict(notes)
    fields = notes[ENGINE_NOTES_KEY]
    own_fields = {name: fields[name] for name in _OWN_FIELDS if name in fields}
    return {**notes, ENGINE_NOTES_KEY: {**own_fields, "revision": fields.get("revision", 0) + 1}}


def notes_of_copy(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot's notes for another session: without the engine's, as of a new one."""
    return {key: note for key, note in notes.items() if key != ENGINE_NOTES_KEY}


def notes_of_same_text(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot's notes for another session with the same text and cells.

    What the engine noted about these stays; the name and what belongs to it do not.
    """
    if ENGINE_NOTES_KEY not in notes:
        return dict(notes)
    fields = notes[ENGINE_NOTES_KEY]
    kept = {key: fields[key] for key in fields if key not in _FIELDS_OF_A_NAME}
    return {**notes, ENGINE_NOTES_KEY: kept}


@dataclass(frozen=True)
class LaterFields:
    """Changes of a session's fields since its snapshot was saved; its text is not among them.

    revision: of the session with these.
    """

    revision: int
    title: str | None
    resident: bool
    notes: dict[str, Any]

    @classmethod
    def of_marker(cls, marker: Any) -> "LaterFields | None":
        """Return the fields in a marker; None if there are none."""
        try:
            fields = cls(**marker["later"])
        except (LookupError, TypeError):
            return None
        types = type(fields.revision), type(fields.resident), type(fields.notes)
        has_title = isinstance(fields.title, str | None)
        return fields if types == (int, bool, dict) and has_title else None


class SessionFile:
    """The snapshot of a session, and its marker, in a folder that the engine has locked."""

    def __init__(self, folder: SessionFolder, name: str):
        """Raises InvalidArgument for an invalid name."""
        self.path = folder.path(name)
        self._folder, self._name = folder, name
        self._marker = self.path.with_suffix(MARKER_SUFFIX)

    @property
    def nbytes(self) -> int:
        """The size of the snapshot; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def remove(self) -> None:
        """Delete the snapshot and the marker."""
        self.clear_marker()
        self._folder.discard(self._name)

    def write_marker(
        self, revision: int, token_count: int | None, later: LaterFields | None = None
    ) -> None:
        """Note on disk that memory holds a newer revision, with so many tokens, than the file.

        later: fields that an engine takes from the marker. token_count: None if only they changed.
        """
        temporary = self._marker.with_suffix(f"{MARKER_SUFFIX}.new")
        marker: dict[str, Any] = {"revision": revision, "tokens": token_count}
        if later is not None:
            marker["later"] = asdict(later)
        text = json.dumps(marker)
        temporary.write_text(text, encoding="utf-8")  # not synced: for kills, not for power cuts
        temporary.replace(self._marker)

    def clear_marker(self) -> None:
        self._marker.unlink(missing_ok=True)

    def read_marker(self) -> tuple[int, LaterFields | None]:
        """Return the unsaved revision that the marker names, and its fields; 0 without a marker."""
        try:
            marker = json.loads(self._marker.read_text(encoding="utf-8"))
            return int(marker["revision"]), LaterFields.of_marker(marker)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return 0, None


def owner_folders(folder: Path) -> list[SessionFolder]:
    """Return the folders of sessions in an engine's folder, one for each owner."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [SessionFolder(path) for path in paths if path.is_dir() and is_valid_owner(path.name)]


def holds_sessions(folder: SessionFolder) -> bool:
    """Whether a folder has sessions, or markers of sessions."""
    return any(folder.newest_first()) or any(folder.root.glob(f"*{MARKER_SUFFIX}"))


def remove_orphaned_markers(folder: SessionFolder) -> list[str]:
    """Remove the markers of sessions that were never saved; return the sessions' names."""
    removed_names, saved_names = list[str](), folder.names()
    for marker in folder.root.glob(f"*{MARKER_SUFFIX}"):
        if is_valid_name(marker.stem) and marker.stem not in saved_names:
            marker.unlink(missing_ok=True)
            removed_names.append(marker.stem)
    return removed_names


def is_valid_owner(name: str) -> bool:
    return _OWNER_PATTERN.fullmatch(name) is not None
