"""Saving of the session that a command works on."""

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
    """The result of one save.

    what: the session, for messages. bytes: the size of the file.
    """

    what: str
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} saved, {megabytes(self.bytes)} in {self.seconds:.2f} s"


class SessionWriter:
    """Writes a session to its file atomically.

    what: the session or file, for messages. notes: JSON values saved beside the session. They are
    not copied, so later changes to them are saved too. saved: the last save; None before the first.
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
        """Save another session from now on; notes replace those of the same name."""
        if session is not self._session:
            self._session, self._changed = session, lambda: True  # the file holds another session
        self.notes.update(notes)

    @property
    def unsaved(self) -> bool:
        """Whether the session changed since it was opened or saved."""
        return self._changed()

    @property
    def outcome(self) -> str:
        """The save in words, for the closing line; "" if there was nothing to save."""
        if self.unsaved:
            return f"{self.what} not saved"
        return str(self.saved or "")

    def save(self) -> None:
        """Write the file if the session changed since it was opened or saved."""
        if self.unsaved:
            self.write()

    def write(self) -> None:
        """Write the file. Ctrl-C is deferred until then; a second one leaves the old file."""
        begun = time.perf_counter()
        with first_interrupt_deferred():
            snapshot = replace(self._session.snapshot(), notes=self.notes)
            size = snapshot.save(_resolved(self._file), self._codec)
            self._changed = self._session.watch()
            self.saved = SaveResult(self.what, size, time.perf_counter() - begun)


def _resolved(file: "Path | SessionPath") -> "Path | SessionPath":
    return file.resolve() if isinstance(file, Path) else file
