"""Saving the session that a command works on."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.cli.output import megabytes
from kvkeep.runtime.signals import first_interrupt_deferred

if TYPE_CHECKING:
    from kvkeep import Session
    from kvkeep.storage.sessions.shared import SessionPath
    from kvkeep.storage.snapshots.codec import Codec


@dataclass(frozen=True)
class SaveResult:
    """One save. what: as the user knows it."""

    what: str
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} saved, {megabytes(self.bytes)} in {self.seconds:.2f} s"


class SessionWriter:
    """Writes a session to its file: whole, or not at all.

    what: the file, as the user knows it. notes: JSON values to keep beside the session; they are
    not copied, so that whoever changes them need not say so. saved: the last time that the file was
    written; None if it was not.
    """

    def __init__(
        self,
        session: "Session",
        file: "Path | SessionPath",
        what: str,
        notes: dict[str, Any],
        codec: "Codec" = "none",
    ):
        self.notes = notes
        self.saved: SaveResult | None = None
        self.what = what
        self._session, self._file, self._codec = session, file, codec
        self._changed = session.watch()

    def follow(self, session: "Session", notes: dict[str, Any]) -> None:
        """Saves another session from now on; notes replace those of the same name."""
        if session is not self._session:
            self._session, self._changed = session, lambda: True  # the file holds another
        self.notes.update(notes)

    @property
    def unsaved(self) -> bool:
        """Whether the session changed since it was opened or saved."""
        return self._changed()

    @property
    def outcome(self) -> str:
        """What became of the session, for the closing line; "" where nothing was to be saved."""
        if self.unsaved:
            return f"{self.what} not saved"
        return str(self.saved or "")

    def save(self) -> None:
        """Writes the file if the session changed since it was opened or saved."""
        if self.unsaved:
            self.write()

    def write(self) -> None:
        """Writes the file. Ctrl-C waits until that is done; a second one leaves the old file."""
        begun = time.perf_counter()
        with first_interrupt_deferred():
            snapshot = replace(self._session.snapshot(), notes=self.notes)
            size = snapshot.save(_resolved(self._file), self._codec)
            self._changed = self._session.watch()
            self.saved = SaveResult(self.what, size, time.perf_counter() - begun)


def _resolved(file: "Path | SessionPath") -> "Path | SessionPath":
    return file.resolve() if isinstance(file, Path) else file
