"""The disk of an engine's sessions: locked folders, the thread that writes, and snapshots."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from kvkeep.chat.written import WrittenAnswers
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.engine.memory_bound import MemoryBound
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.session_files import (
    ENGINE_NOTES_KEY,
    WRITTEN_NOTES_KEY,
    LabelledSnapshots,
    SessionFile,
    holds_sessions,
    owner_folders,
    remove_orphaned_markers,
)
from kvkeep.errors import InvalidArgument, KvkeepError, StoreError
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.sessions.folder import LabelFolder, SessionFolder
from kvkeep.storage.sessions.interface import require_distinct
from kvkeep.storage.snapshots.codec import Codec
from kvkeep.storage.snapshots.header import rounded_by
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document


class SessionDisk:
    """The folder of an engine's sessions, if it has one, and their labelled snapshots.

    Used in the engine's thread only. The folders are locked until `close`.
    """

    def __init__(
        self,
        model: Model,
        folder: Path | None,
        snapshots: Callable[[str], LabelledSnapshots] | None = None,
        checkpoint_bytes: int | None = None,
        codec: Codec = "exact",
        calibration: Calibration | None = None,
    ):
        """folder: for saved and evicted sessions; None to keep sessions in memory only. snapshots:
        returns an owner's labelled snapshots; None for those in `folder`. checkpoint_bytes: of
        sessions from snapshots; None for the default of sessions. codec: of all files. calibration:
        of sessions from snapshots that need another one than the model's stored one."""
        self.model, self.codec = model, codec
        self._checkpoint_bytes, self._calibration = checkpoint_bytes, calibration
        self._folder, self._labelled_snapshots = folder, snapshots
        self._locked_folders = dict[str, SessionFolder]()  # by owner
        self._locks = ExitStack()
        # Generated answers of all owners; those in a session's text are saved with it.
        self.written = WrittenAnswers()
        # One thread writes all files, so that an older save never ends after a newer one.
        self.writer = ThreadPoolExecutor(1, "kvkeep-save")
        self.losses: list[str] = []  # messages about unsaved changes of an earlier process
        self._unread = set[Path]()  # files that could not be read, and are left unchanged

    def recover(self) -> Iterator[SessionRecord]:
        """Yield the records of all saved sessions, on disk only.

        Raises Locked if another engine uses an owner's folder.
        """
        for owner_folder in owner_folders(self._folder) if self._folder else ():
            yield from self._recover(owner_folder)

    def _recover(self, folder: SessionFolder) -> Iterator[SessionRecord]:
        """Yield the records of an owner's sessions.

        Files of earlier versions lack the time of the last use, and count as used when saved.
        """
        owner = folder.root.name
        folder.sweep()  # removes temporary files of killed processes
        if not holds_sessions(folder):
            return
        self._locked_folder(owner)  # before markers are read: an engine that has it writes them
        for path in reversed(list(folder.newest_first())):
            file = SessionFile(folder, name := path.stem)
            try:
                document = read_snapshot_document(file.path)
            except StoreError as error:
                self._unread.add(file.path)
                self.losses.append(f"{file.path} was not loaded and is left unchanged: {error}")
                continue
            record = SessionRecord(name, owner, named=True, file=file, session=None)
            notes = document.get("notes", {})
            record.restore_from(notes)
            used = notes.get(ENGINE_NOTES_KEY, {}).get("used")
            record.restore_use(path.stat().st_mtime if used is None else used)
            record.file_rounded, record.file_bytes = rounded_by(document), file.nbytes
            with suppress(LookupError, TypeError, ValueError, KvkeepError):  # loading reports it
                record.bound = MemoryBound.of_document(document)
            unsaved_revision, later = file.read_marker()
            if later is not None and later.revision > record.revision:
                record.take_later(later)
            if unsaved_revision > record.revision:
                record.lost_revision = unsaved_revision
                self.losses.append(
                    f"session {name!r} resumes at revision {record.revision}: later changes, up to "
                    f"revision {unsaved_revision}, were not saved"
                )
            if record.later is None:
                file.clear_marker()
            elif record.lost_revision is not None:  # it is reported once
                with suppress(OSError):
                    file.write_marker(record.revision, None, record.later)
            yield record
        for name in remove_orphaned_markers(folder):
            self.losses.append(f"session {name!r} was never saved and is lost")

    def _locked_folder(self, owner: str) -> SessionFolder:
        """Return an owner's folder, locked until `close`. Raises Locked if an engine uses it."""
        assert self._folder is not None
        if owner not in self._locked_folders:
            folder = SessionFolder(self._folder / owner)
            self._locks.enter_context(folder.lock_all())
            self._locked_folders[owner] = folder
        return self._locked_folders[owner]

    def new_file(self, owner: str, name: str) -> SessionFile | None:
        """Return the file of a new session; None if the engine has no folder.

        Raises InvalidArgument for an invalid name, Locked, and StoreError if there is a file of
        that name which could not be read; InvalidArgument if its name differs only in case.
        """
        if self._folder is None:
            return None
        file = SessionFile(self._locked_folder(owner), name)
        unread = {path for path in self._unread if path.parent == file.path.parent}
        unread_names = {path.stem for path in unread if path.exists()}
        require_distinct(name, unread_names)
        if name in unread_names:
            raise StoreError(
                f"session {name!r} cannot be created: {file.path} could not be read, and is "
                "left unchanged. Move it to another folder to use the name"
            )
        return file

    def load(self, record: SessionRecord) -> Session:
        """Return the session, read from its file if it is on disk only. Raises StoreError."""
        if record.session is None:
            assert record.file is not None
            record.session = self.restored(Snapshot.load(record.file.path), record.owner)
            record.compare_steps()
        return record.session

    def restored(self, snapshot: Snapshot, owner: str) -> Session:
        """Return the session of a snapshot, with the engine's limit of checkpoints.

        The answers in its text are remembered for the owner, for when clients send them back.
        """
        session = self.model.restore(snapshot, calibration=self._calibration)
        if self._checkpoint_bytes is not None:
            session.checkpoint_bytes = self._checkpoint_bytes
        engine_notes = snapshot.notes.get(ENGINE_NOTES_KEY, {})
        if answers := engine_notes.get(WRITTEN_NOTES_KEY):
            self.written.add_noted(owner, session.tokens, answers)
        return session

    def save(self, record: SessionRecord) -> None:
        """Write the session to its file, after the saves in progress. Raises StoreError."""
        snapshot, path = self.snapshot(record), record.require_file().path
        self.writer.submit(snapshot.save_by, path, self.codec).result()
        record.mark_saved(record.revision)

    def save_later(self, record: SessionRecord) -> None:
        """Write the fields that only the marker has to the file of a session on disk.

        Raises StoreError.
        """
        path = record.require_file().path

        def write() -> None:
            snapshot, notes = Snapshot.load(path), record.snapshot_notes()
            notes[ENGINE_NOTES_KEY] = {
                **snapshot.notes.get(ENGINE_NOTES_KEY, {}),
                **notes[ENGINE_NOTES_KEY],
            }
            replace(snapshot, notes=notes).save_by(path, self.codec)

        self.writer.submit(write).result()
        record.mark_saved(record.revision)

    def snapshot(self, record: SessionRecord) -> Snapshot:
        """Return a snapshot of the session, with the record's notes. Raises StoreError."""
        session, notes = self.load(record), record.snapshot_notes()
        if answers := self.written.notes_of(record.owner, session.tokens):
            notes[ENGINE_NOTES_KEY][WRITTEN_NOTES_KEY] = answers
        return replace(session.snapshot(), notes=notes)

    @property
    def shares_snapshots(self) -> bool:
        """Whether labelled snapshots are in a store of several servers, and sessions here only."""
        return self._labelled_snapshots is not None and self._folder is None

    def snapshots_of(self, owner: str) -> LabelledSnapshots:
        """Return an owner's labelled snapshots. Raises InvalidArgument if there is no folder."""
        if self._labelled_snapshots is not None:
            return self._labelled_snapshots(owner)
        if self._folder is None:
            raise InvalidArgument("the engine has no folder for snapshots")
        return LabelFolder(self._folder / owner / "snapshots")

    def close(self) -> None:
        """Unlock the sessions' folders, for other processes."""
        self._locks.close()
