"""The sessions of an engine: by name, within a memory limit, moved to disk and back."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.cache.storage import nbytes
from kvkeep.engine.record import SessionRecord, max_session_bytes
from kvkeep.engine.scheduler import SchedulingPolicy
from kvkeep.engine.session_files import (
    NOTES,
    SessionFiles,
    SnapshotLabels,
    clear_marker,
    other_notes,
    require_owner,
    write_marker,
)
from kvkeep.errors import InvalidArgument, NoRoom, NoSuchSession
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot


class SessionRegistry:
    """The records of all sessions. Used in the engine's thread only."""

    def __init__(
        self,
        model: Model,
        folder: Path | None,
        policy: SchedulingPolicy,
        snapshots: Callable[[str], SnapshotLabels] | None = None,
    ):
        """folder: where sessions are saved and evicted to; None for nowhere: named ones then stay
        in memory, and all are lost with the process. snapshots: gives an owner's snapshots by
        label; None for those in the folder."""
        self._model, self._policy = model, policy
        self._files = None if folder is None else SessionFiles(folder)
        if snapshots is None and self._files is not None:
            snapshots = self._files.snapshots
        self._snapshots = snapshots
        self._records: dict[tuple[str, str], SessionRecord] = {}
        for record in self._files.recover() if self._files else ():
            self._records[record.owner, record.name] = record

    @property
    def losses(self) -> list[str]:
        """Descriptions of what earlier sessions in the folder have lost, a line for each."""
        unreadable = self._files.unreadable if self._files else {}
        never_saved = self._files.never_saved if self._files else []
        return [
            *(f"{file} is left where it is: {why}" for file, why in unreadable.items()),
            *(f"session {name!r} was never saved, and is lost" for _, name in never_saved),
            *(
                f"session {record.name!r} goes on from revision {record.saved_revision}: what came "
                f"after it, up to {record.lost_revision}, was not saved"
                for record in self
                if record.lost_revision is not None
            ),
        ]

    # By name

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._records.values()))

    def of(self, owner: str) -> list[SessionRecord]:
        """Return all sessions of an owner, the most recently used first."""
        records = [record for record in self if record.owner == owner]
        return sorted(records, key=lambda record: record.last_used, reverse=True)

    def get(self, name: str, owner: str) -> SessionRecord | None:
        return self._records.get((owner, name))

    def find(self, name: str, owner: str) -> SessionRecord:
        """Raises NoSuchSession, also for the name of another owner's session."""
        record = self.get(name, owner)
        if record is None:
            raise NoSuchSession(f"there is no session {name!r}")
        return record

    def add(
        self,
        session: Session,
        owner: str,
        name: str | None = None,
        parent: str | None = None,
        named: bool = True,
        notes: dict[str, Any] | None = None,
    ) -> SessionRecord:
        """Register a session. name: None for a generated one.

        Raises InvalidArgument for a name that is not valid or is taken, Locked if another process
        uses a session of that name in the same folder, NoRoom.
        """
        require_owner(owner)
        name = name or f"s-{secrets.token_hex(8)}"
        file = self._files.path(owner, name) if named and self._files else None
        if self.get(name, owner):
            raise InvalidArgument(f"there is a session {name!r} already")
        record = SessionRecord(name, owner, named, file, session, parent=parent, notes=notes or {})
        # With snapshots in a store and sessions in no folder, what must last is in the store.
        record.evictable = named and file is None and self._snapshots is not None
        self.reserve(record, 0)
        if file is not None and self._files is not None:
            self._files.lock(record)
            write_marker(record, file)
        self._records[owner, name] = record
        return record

    def add_borrowed(
        self, session: Session, owner: str, name: str, notes: dict[str, Any]
    ) -> SessionRecord:
        """Register a session as another engine had it, in the place of a borrowed one of that name.

        notes: of the snapshot that it was restored from. Raises Busy, NoRoom, and InvalidArgument
        if the engine has a session of its own by that name.
        """
        if previous := self.get(name, owner):
            if not previous.borrowed:
                raise InvalidArgument(f"this server has a session {name!r} of its own")
            self.remove(previous)
        record = self.add(session, owner, name, notes=other_notes(notes))
        record.resume(notes.get(NOTES, {}))
        return record

    def remove(self, record: SessionRecord) -> None:
        """Forget a session and delete its file. Raises Busy."""
        record.require_idle()
        del self._records[record.owner, record.name]
        record.session, record.removed = None, True
        if record.file is not None and self._files is not None:
            self._files.remove(record, record.file)

    # Within the memory limit

    @property
    def nbytes(self) -> int:
        """The bytes that all sessions in memory can come to take.

        What is reserved for busy ones, and what idle ones hold; shared storage counts once.
        """
        busy = [record for record in self if record.busy]
        idle = [
            record.live.cache for record in self if record.session is not None and not record.busy
        ]
        held = nbytes([segment for cache in idle for segment in cache.all_segments])
        return held + sum(record.reserved for record in busy)

    def shared_bytes(self, record: SessionRecord) -> int:
        """Return the bytes of a session's storage that other sessions use, too."""
        others = {
            segment.block.storage
            for other in self
            if other is not record and other.session is not None
            for segment in other.session.cache.all_segments
        }
        storages = {segment.block.storage for segment in record.live.cache.all_segments}
        return sum(storage.nbytes for storage in storages & others)

    def reserve(self, record: SessionRecord, tokens: int | None, copies: int = 1) -> None:
        """Reserve the bytes that a session can take with so many more tokens; None for any number.

        Loads it, and evicts others if necessary. copies: how many sessions like it are reserved.
        Raises NoRoom if every other session is pinned or busy.
        """
        session = self.load(record)
        requested, limit = copies * max_session_bytes(session, tokens), self._policy.limits.memory
        self._policy.admit_bytes(requested)
        counted = self.get(record.name, record.owner) is record and not record.busy
        held = session.cache.nbytes if counted else 0  # part of `nbytes`
        while self.nbytes - held + requested > limit:
            victim = self._policy.victim(self, needed=record)
            if victim is None:
                raise NoRoom(
                    f"{requested / 1e6:,.0f} MB are wanted, and of {limit / 1e6:,.0f} MB "
                    f"{self.nbytes / 1e6:,.0f} are taken by sessions that are busy or pinned"
                )
            self.evict(victim)
        record.reserved = requested

    def reserve_idle(self, record: SessionRecord) -> None:
        """Reserve what a session takes as it is, and load it; a busy one has its reservation."""
        if not record.busy:
            self.reserve(record, 0)

    def evict(self, record: SessionRecord) -> None:
        """Remove an idle session from memory; save it first if it would be lost."""
        if record.droppable:
            self.remove(record)
            return
        if record.dirty:
            self.save(record)
        record.session = None

    # To disk and back

    def load(self, record: SessionRecord) -> Session:
        """Return the session, read from its file if it is not in memory.

        Raises StoreError and its kinds for a file that is not valid.
        """
        if record.session is None:
            assert record.file is not None
            record.session = self._model.restore(Snapshot.load(record.file))
        return record.session

    def save(self, record: SessionRecord) -> int:
        """Write the session to its file; returns its bytes. Raises StoreError."""
        size = self.snapshot(record).save(self.file(record))
        self.mark_saved(record, record.revision)
        return size

    def snapshot(self, record: SessionRecord) -> Snapshot:
        """Return what `save` writes, for a caller that writes it and then calls `mark_saved`."""
        notes = {**record.notes, NOTES: record.noted_fields()}
        return replace(self.load(record).snapshot(), notes=notes)

    def mark_saved(self, record: SessionRecord, revision: int) -> None:
        """Note that a revision is saved."""
        record.saved_revision = revision
        if not record.dirty and record.file is not None:
            clear_marker(record.file)

    def mark_unsaved(self, record: SessionRecord) -> None:
        """Note on disk that a session has changed, in case the engine is killed before the save."""
        if record.file is not None:
            write_marker(record, record.file)

    def file(self, record: SessionRecord) -> Path:
        """Return where a session is saved. Raises InvalidArgument if it is in memory alone."""
        if record.file is None:
            raise InvalidArgument(
                f"session {record.name!r} cannot be saved: the engine has no folder for sessions"
            )
        return record.file

    def snapshots_of(self, owner: str) -> SnapshotLabels:
        """Raises InvalidArgument if the engine keeps nothing on disk."""
        if self._snapshots is None:
            raise InvalidArgument("the engine has no folder for snapshots")
        return self._snapshots(owner)

    def close(self) -> None:
        """Let other processes use the sessions."""
        if self._files:
            self._files.unlock_all()
