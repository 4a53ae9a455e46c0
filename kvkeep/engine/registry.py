"""The sessions of an engine: by name, within a memory limit, evicted to disk and loaded again."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter

from kvkeep.engine.memory_bound import MemoryBound
from kvkeep.engine.pins import PrefixPins
from kvkeep.engine.record import SessionRecord, is_response_name
from kvkeep.engine.releases import Releases
from kvkeep.engine.scheduler import SchedulingPolicy
from kvkeep.engine.session_disk import SessionDisk
from kvkeep.engine.session_files import is_valid_owner
from kvkeep.engine.steps import StepGrid
from kvkeep.errors import InvalidArgument, NoRoom, NoSuchSession, StoreError
from kvkeep.session.memory import memory_bytes
from kvkeep.session.session import Session
from kvkeep.storage.sessions.interface import require_distinct
from kvkeep.storage.snapshots.header import read_summary

_log = logging.getLogger("kvkeep.engine")


class SessionRegistry:
    """The records of all sessions. Used in the engine's thread only."""

    def __init__(self, disk: SessionDisk, policy: SchedulingPolicy):
        self.disk, self.policy = disk, policy
        self.pins = PrefixPins(policy.limits.pins_per_owner)
        self.releases = Releases()  # of memory and slots
        self._other_bytes = 0  # reserved for what is no session
        self._records = {(record.owner, record.name): record for record in disk.recover()}

    # By name

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._records.values()))

    def owned_by(self, owner: str, cache_key: str = "") -> list[SessionRecord]:
        """Return an owner's sessions, the last used first.

        cache_key: of a prompt; the session that is pinned with it comes before all others.
        """
        records = self._records_of(owner)
        records.sort(key=attrgetter("last_used"), reverse=True)
        preferred = self.pins.session_with_key(owner, cache_key)
        if preferred is not None and preferred in records:
            records.remove(preferred)
            records.insert(0, preferred)
        return records

    def _records_of(self, owner: str) -> list[SessionRecord]:
        """Return an owner's sessions in any order: there may be thousands."""
        return [record for record in self._records.values() if record.owner == owner]

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
        self,
        session: Session,
        owner: str,
        name: str | None = None,
        named: bool = True,
        source: SessionRecord | None = None,
    ) -> SessionRecord:
        """Register a session; generate a missing name. source: see `SchedulingPolicy.victims`.

        Raises InvalidArgument, NoRoom, Locked, and StoreError if the name's file cannot be read.
        """
        others = self._records_of(owner) if named else []
        if named and not is_response_name(name or ""):
            self.policy.require_session_slot(others)
        if not is_valid_owner(owner):
            raise InvalidArgument(f"an owner must be 1 to 64 of a-z and 0-9; found {owner!r}")
        name = name or _new_name()
        file = self.disk.new_file(owner, name) if named else None
        if file is not None:
            require_distinct(name, (record.name for record in others))
        if self.get(name, owner):
            raise InvalidArgument(f"session {name!r} already exists")
        record = SessionRecord(name, owner, named, file, session)
        record.steps = StepGrid.of(session).name
        # With snapshots in a store and sessions in memory only, unsaved sessions may be lost.
        record.ephemeral = named and self.disk.shares_snapshots
        self.reserve(record, 0, source=source)
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
        self.releases.notify()

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
                resident=False,
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

    def _bytes_beside(self, requester: SessionRecord | None, evictable: bool = True) -> int:
        """Return `nbytes` without those that only an idle requester holds.

        evictable: whether sessions that can be evicted count.
        """
        memories, reserved_bytes = [], 0
        for record in self._records.values():
            if record.busy:
                reserved_bytes += record.reserved_bytes
            elif record.session is None or record is requester:
                continue
            elif evictable or not record.evictable:
                memories.append(record.session.core.memory)
        return memory_bytes(memories) + reserved_bytes + self._other_bytes

    def room_bytes(self, requester: SessionRecord | None = None) -> int:
        """Return the bytes that are free, or held by sessions that can be evicted.

        requester: an idle session, whose own bytes count as free.
        """
        return self.policy.limits.memory - self._bytes_beside(requester, evictable=False)

    def require_room(self, requested_bytes: int, requester: SessionRecord | None = None) -> None:
        """Raise NoRoom if the bytes of a requester would not fit with all evicted that can be."""
        self.policy.require_fits_memory(requested_bytes)
        room_bytes, limit = self.room_bytes(requester), self.policy.limits.memory
        if requested_bytes > room_bytes:
            own_bytes = room_bytes - self.room_bytes()
            raise NoRoom(
                f"not enough memory: the request needs {requested_bytes / 1e6:,.1f} MB, and "
                f"{(limit - room_bytes) / 1e6:,.1f} of {limit / 1e6:,.1f} MB are held by sessions "
                "that cannot be evicted (busy, resident, or without a file to be saved to); retry "
                "later, or delete a session",
                needed_bytes=requested_bytes - own_bytes,
            )

    def shared_bytes(self, record: SessionRecord) -> int:
        """Return the bytes of a session that other sessions, such as forks, share."""
        live = [x.session.core.memory for x in self if x is not record and x.session is not None]
        memory = record.live.core.memory
        return memory.nbytes + memory_bytes(live) - memory_bytes([memory, *live])

    def reserve(
        self,
        record: SessionRecord,
        new_tokens: int | None,
        copies: int = 1,
        source: SessionRecord | None = None,
    ) -> None:
        """Load a session and reserve the bytes that it can take with `new_tokens` more.

        Evicts others if necessary. new_tokens: None for any number. copies: the session and the
        forks that will be made of it. source: see `SchedulingPolicy.victims`. Raises NoRoom, with
        nothing evicted, and StoreError; the session stays on disk then if it was.
        """
        was_in_memory = record.session is not None
        if not was_in_memory:
            self._make_room(self._file_bytes(record, new_tokens, copies), record, source)
        session = self.disk.load(record)
        bound = MemoryBound.of(session)
        try:
            self._make_room(requested_bytes := copies * bound.max_bytes(new_tokens), record, source)
        except BaseException:
            if not was_in_memory:
                record.session, record.bound = None, bound
            raise
        record.reserved_bytes = requested_bytes

    def _file_bytes(self, record: SessionRecord, new_tokens: int | None, copies: int = 1) -> int:
        """Return the bytes that a session on disk needs, at least, with `new_tokens` more."""
        nbytes = record.require_file().nbytes
        return max(nbytes, copies * record.bound.max_bytes(new_tokens)) if record.bound else nbytes

    def require_room_to_load(self, record: SessionRecord, new_tokens: int | None) -> None:
        """Raise NoRoom for a session on disk that would not fit with `new_tokens` more."""
        if record.session is None:
            self.require_room(self._file_bytes(record, new_tokens), record)

    @contextmanager
    def reserving(self, requested_bytes: int) -> Iterator[None]:
        """Reserve bytes beside those of sessions, and free them at the end. Raises as `reserve`."""
        self._make_room(requested_bytes)
        self._other_bytes += requested_bytes
        try:
            yield
        finally:
            self._other_bytes -= requested_bytes
            self.releases.notify()

    def _make_room(
        self,
        requested_bytes: int,
        requester: SessionRecord | None = None,
        source: SessionRecord | None = None,
    ) -> None:
        """Evict sessions until the bytes of a requester fit, in the place of those that it holds.

        Raises NoRoom, with nothing evicted, if there would be too few. Sessions that cannot be
        saved stay. Raises their StoreError if there is no room beside them.
        """
        limit, failures = self.policy.limits.memory, list[StoreError]()
        self.policy.require_fits_memory(requested_bytes)
        if self._bytes_beside(requester) + requested_bytes <= limit:
            return
        self.require_room(requested_bytes, requester)
        victims = self.policy.victims(self, requester, self.pins.clock(), source)
        while (in_use := self._bytes_beside(requester)) + requested_bytes > limit:
            if not self._evict_some(victims, in_use + requested_bytes - limit, failures):
                raise failures[0]  # with all evicted there is room

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
            self.disk.save(record)
        self._drop_pins(record)
        if is_lost:
            self.remove(record)
            return
        with suppress(StoreError):  # loading it reports that it cannot be read
            record.file_rounded = read_summary(record.require_file().path).rounded
        record.bound = MemoryBound.of(record.live)
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


def _new_name() -> str:
    return f"s-{secrets.token_hex(8)}"
