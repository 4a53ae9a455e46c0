"""The sessions of an engine: by name, within a memory limit, evicted to disk and loaded again."""

import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvkeep.chat.written import WrittenAnswers
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.engine.pins import PrefixPins
from kvkeep.engine.record import SessionRecord, is_response_name, max_session_bytes
from kvkeep.engine.scheduler import SchedulingPolicy
from kvkeep.engine.session_files import (
    ENGINE_NOTES_KEY,
    WRITTEN_NOTES_KEY,
    LabelledSnapshots,
    SessionFile,
    holds_sessions,
    is_valid_owner,
    owner_folders,
    remove_orphaned_markers,
)
from kvkeep.engine.steps import StepGrid
from kvkeep.errors import InvalidArgument, NoRoom, NoSuchSession, StoreError
from kvkeep.model import Model
from kvkeep.session.memory import memory_bytes
from kvkeep.session.session import Session
from kvkeep.storage.sessions.folder import LabelFolder, SessionFolder
from kvkeep.storage.snapshots.codec import Codec
from kvkeep.storage.snapshots.header import read_summary, rounded_by
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document

_log = logging.getLogger("kvkeep.engine")


class SessionRegistry:
    """The records of all sessions. Used in the engine's thread only."""

    def __init__(
        self,
        model: Model,
        folder: Path | None,
        policy: SchedulingPolicy,
        snapshots: Callable[[str], LabelledSnapshots] | None = None,
        checkpoint_bytes: int | None = None,
        codec: Codec = "exact",
        calibration: Calibration | None = None,
    ):
        """folder: for saved and evicted sessions; None to keep sessions in memory only. snapshots:
        returns an owner's labelled snapshots; None for those in `folder`. checkpoint_bytes: of
        sessions from snapshots; None for the default of sessions. codec: of all files. calibration:
        of sessions from snapshots that need another one than the model's stored one."""
        self.codec = codec
        self.model, self.policy = model, policy
        self.pins = PrefixPins(policy.limits.pins_per_owner)
        self._checkpoint_bytes, self._calibration = checkpoint_bytes, calibration
        self._folder, self._labelled_snapshots = folder, snapshots
        self._locked_folders = dict[str, SessionFolder]()  # by owner
        self._locks = ExitStack()
        self._records: dict[tuple[str, str], SessionRecord] = {}
        # Generated answers of all owners; those in a session's text are saved with it.
        self.written = WrittenAnswers()
        self._other_bytes = 0  # reserved for what is no session
        # One thread writes all files, so that an older save never ends after a newer one.
        self.writer = ThreadPoolExecutor(1, "kvkeep-save")
        self.losses: list[str] = []  # messages about unsaved changes of an earlier process
        self._unread = set[Path]()  # files that could not be read, and are left unchanged
        for owner_folder in owner_folders(folder) if folder else ():
            self._recover(owner_folder)

    def _recover(self, folder: SessionFolder) -> None:
        """Register an owner's sessions, on disk only. Raises Locked if an engine uses one.

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
            unsaved_revision = file.marked_revision()
            if unsaved_revision > record.revision:
                record.lost_revision = unsaved_revision
                self.losses.append(
                    f"session {name!r} resumes at revision {record.revision}: later changes, up to "
                    f"revision {unsaved_revision}, were not saved"
                )
            file.clear_marker()
            self._records[owner, name] = record
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

    # By name

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._records.values()))

    def owned_by(self, owner: str, cache_key: str = "") -> list[SessionRecord]:
        """Return an owner's sessions, the last used first.

        cache_key: of a prompt; the session that is pinned with it comes before all others.
        """
        records = [record for record in self if record.owner == owner]
        preferred = self.pins.session_with_key(owner, cache_key)
        return sorted(records, key=lambda r: (r is preferred, r.last_used), reverse=True)

    def get(self, name: str, owner: str) -> SessionRecord | None:
        return self._records.get((owner, name))

    def find(self, name: str, owner: str, revision: int | None = None) -> SessionRecord:
        """Return a session by name, in memory or not. Raises NoSuchSession, WrongRevision."""
        record = self.get(name, owner)
        if record is None:
            raise NoSuchSession(f"there is no session {name!r}")
        record.require_revision(revision)
        return record

    def add(
        self, session: Session, owner: str, name: str | None = None, named: bool = True
    ) -> SessionRecord:
        """Register a session; generate a missing name.

        Raises InvalidArgument, NoRoom, Locked, and StoreError if the name's file cannot be read.
        """
        if named and not is_response_name(name or ""):
            self.policy.require_session_slot(self.owned_by(owner))
        if not is_valid_owner(owner):
            raise InvalidArgument(f"an owner must be 1 to 64 of a-z and 0-9; found {owner!r}")
        name = name or _new_name()
        file = None
        if named and self._folder is not None:
            file = SessionFile(self._locked_folder(owner), name)
            if file.path in self._unread and file.path.exists():
                raise StoreError(
                    f"session {name!r} cannot be created: {file.path} could not be read, and is "
                    "left unchanged. Move it to another folder to use the name"
                )
        if self.get(name, owner):
            raise InvalidArgument(f"session {name!r} already exists")
        record = SessionRecord(name, owner, named, file, session)
        record.steps = StepGrid.of(session).name
        # With snapshots in a store and sessions in memory only, unsaved sessions may be lost.
        record.ephemeral = named and self.shares_snapshots
        self.reserve(record, 0)
        if file is not None:
            record.mark_unsaved()
        self._records[owner, name] = record
        return record

    def remove(self, record: SessionRecord) -> None:
        """Remove a session and delete its file. Raises Busy."""
        record.require_idle()
        self.pins.detach(record)
        del self._records[record.owner, record.name]
        record.session, record.removed = None, True
        if record.file is not None:
            record.file.remove()

    def remove_name(self, record: SessionRecord) -> None:
        """Make a session unnamed and delete its file. An empty one is removed. Raises Busy."""
        session, pins = record.session, self.pins.detach(record)
        self.remove(record)
        if session is not None and session.cache.cells:
            unnamed = replace(
                record,
                name=_new_name(),
                named=False,
                file=None,
                session=session,
                notes={},
                pinned=False,
                removed=False,
            )
            self._records[unnamed.owner, unnamed.name] = unnamed
            self.pins.attach(unnamed, pins)

    # Within the memory limit

    @property
    def nbytes(self) -> int:
        """Bytes reserved, for busy sessions among others, and held by idle sessions.

        Shared storage counts once.
        """
        return self._bytes_beside(None)

    def _bytes_beside(self, requester: SessionRecord | None) -> int:
        """Return `nbytes` without those that only an idle requester holds."""
        idle = (record for record in self if record.session is not None and not record.busy)
        memories = [record.live.core.memory for record in idle if record is not requester]
        reserved_bytes = sum(record.reserved_bytes for record in self if record.busy)
        return memory_bytes(memories) + reserved_bytes + self._other_bytes

    def shared_bytes(self, record: SessionRecord) -> int:
        """Return the bytes of a session that other sessions, such as forks, share."""
        live = [x.session.core.memory for x in self if x is not record and x.session is not None]
        memory = record.live.core.memory
        return memory.nbytes + memory_bytes(live) - memory_bytes([memory, *live])

    def reserve(self, record: SessionRecord, new_tokens: int | None, copies: int = 1) -> None:
        """Load a session and reserve the bytes that it can take with `new_tokens` more.

        Evicts others if necessary. new_tokens: None for any number. copies: the session and the
        forks that will be made of it. Raises NoRoom, StoreError; the session stays on disk then if
        it was.
        """
        was_in_memory = record.session is not None
        if not was_in_memory:  # before it is read in vain, by requests that try again and again
            self._make_room(record.require_file().nbytes, requester=record)
        session = self.load(record)
        requested_bytes = copies * max_session_bytes(session, new_tokens)
        try:
            self._make_room(requested_bytes, record)
        except BaseException:
            if not was_in_memory:
                record.session = None
            raise
        record.reserved_bytes = requested_bytes

    @contextmanager
    def reserving(self, requested_bytes: int) -> Iterator[None]:
        """Reserve bytes beside those of sessions, and free them at the end. Raises as `reserve`."""
        self._make_room(requested_bytes)
        self._other_bytes += requested_bytes
        try:
            yield
        finally:
            self._other_bytes -= requested_bytes

    def _make_room(self, requested_bytes: int, requester: SessionRecord | None = None) -> None:
        """Evict sessions until the bytes of a requester fit, in the place of those that it holds.

        Sessions that cannot be saved stay. Raises their StoreError if there is no room beside them.
        """
        limit, failures = self.policy.limits.memory, list[StoreError]()
        self.policy.require_fits_memory(requested_bytes)
        victims = self.policy.victims(self, requester, self.pins.clock())
        while (in_use := self._bytes_beside(requester)) + requested_bytes > limit:
            if self._evict_some(victims, in_use + requested_bytes - limit, failures):
                continue
            if failures:
                raise failures[0]
            raise NoRoom(
                f"the request needs {requested_bytes / 1e6:,.1f} MB; of {limit / 1e6:,.1f} MB, "
                f"{in_use / 1e6:,.1f} MB are in use by others that are busy or resident"
            )

    def _evict_some(
        self, victims: Iterator[SessionRecord], nbytes: int, failures: list[StoreError]
    ) -> bool:
        """Evict sessions until they held `nbytes`, or all; returns False if there are none.

        What is freed can be less, since they share memory with others. failures: to which the
        errors of those that cannot be saved are added; they stay in memory.
        """
        evicted_bytes = evicted_count = 0
        for victim in victims:
            victim_bytes = victim.live.core.memory.nbytes
            try:
                self.evict(victim)
            except StoreError as error:
                failures.append(error)
                continue
            evicted_count += 1
            evicted_bytes += victim_bytes
            if evicted_bytes >= nbytes:
                break
        return evicted_count > 0

    def load_existing(self, name: str, owner: str, revision: int | None = None) -> SessionRecord:
        """Find a session and load it; it may be busy. Raises as `find` and `reserve`.

        Reading a session that is in memory reserves nothing.
        """
        record = self.find(name, owner, revision)
        if record.session is None:
            self.reserve(record, 0)
        return record

    def load_idle(
        self, name: str, owner: str, revision: int | None = None, new_tokens: int = 0
    ) -> SessionRecord:
        """Find an idle session, and reserve memory. Raises Busy, and as `find` and `reserve`."""
        record = self.find(name, owner)
        record.require_idle()
        record.require_revision(revision)
        self.reserve(record, new_tokens)
        return record

    def evict(self, record: SessionRecord) -> None:
        """Remove an idle session from memory; save it first unless it may be lost.

        Raises StoreError; the session and its pins stay in memory then.
        """
        is_lost = record.may_be_lost or not record.named
        if record.dirty and not is_lost:
            self.save(record)
        self._drop_pins(record)
        if is_lost:
            self.remove(record)
            return
        with suppress(StoreError):  # loading it reports that it cannot be read
            record.file_rounded = read_summary(record.require_file().path).rounded
        record.session = None

    def _drop_pins(self, record: SessionRecord) -> None:
        """Remove the pins of a session that is evicted, and log those that have not expired."""
        for pin in self.pins.detach(record):
            self.pins.evicted += 1
            _log.warning(
                "%s of %d tokens is lost %.0f s before its expiry: all of the memory limit is used "
                "by busy, resident and pinned sessions",
                *(pin.id, pin.tokens, pin.expires - self.pins.clock()),
            )

    # To disk and back

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


def _new_name() -> str:
    return f"s-{secrets.token_hex(8)}"
