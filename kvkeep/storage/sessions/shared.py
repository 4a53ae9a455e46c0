"""Sessions by name in a store that several machines share: one writer of each at a time."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal

from kvkeep.errors import HeldElsewhere, InvalidArgument, Locked, NoObject, StoreError
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.interface import ChunkSource
from kvkeep.storage.objects.paths import ObjectPath, ObjectStatus, object_status, open_object
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.driver import HEAD, SessionObjects
from kvkeep.storage.sessions.folder import SNAPSHOT_SUFFIX, checked_name, is_name
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.lease import Lease
from kvkeep.storage.sessions.protocol import LeaseRequest, Operations, VersionedHead

LEASE = 30.0  # seconds that a command line's session stays held after a kill
_ALL = "sessions/"
_READERS = 16  # heads read at once
_AGAIN = 5  # times that a snapshot may be replaced while it is opened


@dataclass(frozen=True)
class SessionPath:
    """What was committed last of a session, whichever that is when it is looked at.

    lease: by which it can be written; None where it can only be read.
    """

    at: SessionObjects
    lease: Lease | None = None

    def __str__(self) -> str:
        return f"session {self.at.name!r} in {self.at.objects.url}"

    @property
    def stem(self) -> str:
        return self.at.name

    def exists(self) -> bool:
        head = self.head()
        return head is not None and bool(head.snapshot)

    def head(self) -> SessionHead | None:
        """None where there is no session."""
        found = self.at.head()
        return None if found is None or found.head.removed else found.head

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Raises NoObject where nothing was committed."""
        for left in reversed(range(_AGAIN)):
            head = self.head()
            if head is None or not head.snapshot:
                break
            try:
                objects = self.at.objects
                return open_object(objects, objects.info(self.at.key(head.snapshot)))
            except NoObject:
                if not left:
                    raise
        raise NoObject(f"there is nothing of {self}")

    def stat(self) -> ObjectStatus:
        """Raises FileNotFoundError."""
        for _ in range(_AGAIN):
            head = self.head()
            if head is None or not head.snapshot:
                break
            try:
                return object_status(self.at.objects, self.at.key(head.snapshot))
            except FileNotFoundError:  # replaced meanwhile
                continue
        raise FileNotFoundError(f"there is nothing of {self}")

    def write_chunks(self, pieces: ChunkSource) -> None:
        assert self.lease is not None, "it is written under its lock"
        self.lease.commit(pieces)


def sweep_all(objects: ObjectStore) -> list[str]:
    """Removes what killed writers of all owners left: OWNER/NAME/WHAT. Raises StoreError."""
    return [
        f"{owner}/{left}"
        for owner in objects.list_folders(_ALL)
        for left in SharedSessions(objects, owner).sweep()
    ]


class SharedSessions:
    """As `SessionFolder`, in a store. Reading needs no lock; a lock is a lease, which another
    process can take once this one has not renewed it for `lease` seconds.

    owner: whose sessions they are. writer: what others are told who has one. clock: seconds since
    1970; a wrong one costs patience, and nothing else.
    """

    def __init__(
        self,
        objects: ObjectStore,
        owner: str = "0",
        writer: str | None = None,
        lease: float = LEASE,
        clock: Callable[[], float] = time.time,
    ):
        self.objects, self.lease, self._clock = objects, lease, clock
        self.writer = writer or f"{socket.gethostname()}:{os.getpid()}"
        self._prefix = f"{_ALL}{owner}/"

    @property
    def place(self) -> str:
        return self.objects.url

    def objects_of(self, name: str) -> SessionObjects:
        """Raises InvalidArgument for a name that is none."""
        return SessionObjects(self.objects, f"{self._prefix}{checked_name(name)}/", name)

    def existing(self, name: str) -> SessionPath:
        """Raises InvalidArgument, naming those there are, where there is none."""
        found = SessionPath(self.objects_of(name))
        if not found.exists():
            known = ", ".join(self.names()) or "none yet"
            raise InvalidArgument(f"there is no session {name!r}; expected one of: {known}")
        return found

    def names(self) -> list[str]:
        """All sessions of which something was committed, in the order of the alphabet."""
        return sorted(place.stem for _, place in self._heads())

    def newest(self) -> Iterator[SessionPath]:
        """All of them, the one saved last first."""
        found = [(modified, place.stem, place) for modified, place in self._heads()]
        return (place for _, _, place in sorted(found, key=lambda each: each[:2], reverse=True))

    @contextmanager
    def lock(self, name: str) -> Iterator[SessionPath]:
        """Keeps others from changing a session meanwhile; it is begun where there is none.

        Raises Locked at once where another holds it.
        """
        lease = self.acquire(name)
        try:
            yield SessionPath(lease.place, lease)
        finally:
            if not lease.head.snapshot and lease.lost is None:
                _removed(lease)  # begun, and never saved
            lease.release()

    def acquire(self, name: str, create: bool = True, known: VersionedHead | None = None) -> Lease:
        """Holds a session until the lease is let go.

        begin: whether it is begun where there is none. known: the version that it is thought to be
        at. Raises NoObject where there is none and none is begun, Locked.
        """
        at, who = self.objects_of(name), self._who()
        try:
            version = at.run(protocol.acquire(who, known))
        except NoObject:
            if not create:
                raise
            version = self._begun(at, who)
        except HeldElsewhere as error:
            raise _held(name, error, self._clock()) from None
        return Lease(at, version, self.writer, self.lease, self._clock)

    def create(self, name: str) -> Lease:
        """Begins a session, and holds it. Raises InvalidArgument where there is one."""
        at = self.objects_of(name)
        version = at.run(protocol.create(self._who()))
        return Lease(at, version, self.writer, self.lease, self._clock)

    def _who(self) -> LeaseRequest:
        return LeaseRequest(self.writer, self._clock(), self.lease)

    def remove(self, name: str) -> int:
        """The bytes freed. Raises InvalidArgument where there is none, Locked."""
        size = self.existing(name).stat().st_size
        lease = self.acquire(name, create=False)
        try:
            lease.remove()
        finally:
            lease.release()
        return size

    def sweep(self) -> list[str]:
        """Removes what killed writers left; what that was."""
        found = list[str]()
        for name in self.objects.list_folders(self._prefix):
            if not is_name(name):
                continue
            try:
                found += [f"{name}/{left}" for left in self._swept(name)]
            except StoreError:  # somebody is at work on it, or has removed it; or it is not sound
                continue
        return found

    def _swept(self, name: str) -> list[str]:
        at = self.objects_of(name)
        version = at.head()
        if version is not None and version.head.removed:
            return []
        lease = self.acquire(name, create=False)
        try:
            found = lease.collect()
            if not lease.head.snapshot:  # begun, and never committed
                lease.remove()
            return found
        finally:
            lease.release()

    def _begun(self, at: SessionObjects, who: LeaseRequest) -> VersionedHead:
        steps: Operations[VersionedHead] = protocol.create(who)
        try:
            return at.run(steps)
        except InvalidArgument:
            raise Locked(f"another process has just begun session {at.name!r}") from None

    def _heads(self) -> list[tuple[float, SessionPath]]:
        """Sessions with something committed, and when their heads were written."""
        listed = [
            (stored.modified, stored.key.removeprefix(self._prefix).removesuffix(f"/{HEAD}"))
            for stored in self.objects.list_objects(self._prefix)
            if stored.key.endswith(f"/{HEAD}")
        ]
        places = [
            (when, SessionPath(self.objects_of(name))) for when, name in listed if is_name(name)
        ]
        with ThreadPoolExecutor(_READERS) as readers:
            there = readers.map(_is_there, [place for _, place in places])
            return [found for found, is_there in zip(places, there, strict=True) if is_there]


def _is_there(place: SessionPath) -> bool:
    try:
        return place.exists()
    except StoreError:  # whoever reads it is told why it cannot be
        return True


def _removed(lease: Lease) -> None:
    try:
        lease.remove()
    except StoreError:
        return


def _held(name: str, error: HeldElsewhere, now: float) -> HeldElsewhere:
    left = max(0.0, error.until - now)
    return HeldElsewhere(
        f"{error.writer} is using session {name!r}; end it, or wait {left:.0f} s after it has "
        "ended or was killed",
        error.writer,
        error.until,
    )


class SharedLabels:
    """One owner's. Nobody holds a label: whoever writes it last has it."""

    def __init__(self, objects: ObjectStore, owner: str):
        self._objects, self._prefix = objects, f"snapshots/{owner}/"

    def path(self, name: str) -> ObjectPath:
        """Raises InvalidArgument for a name that is none."""
        return ObjectPath(self._objects, f"{self._prefix}{checked_name(name)}{SNAPSHOT_SUFFIX}")

    def existing(self, name: str) -> ObjectPath:
        """Raises InvalidArgument, naming those there are, where there is none."""
        place = self.path(name)
        if not place.exists():
            known = ", ".join(self.names()) or "none yet"
            raise InvalidArgument(f"there is no session {name!r}; expected one of: {known}")
        return place

    def names(self) -> list[str]:
        """In the order of the alphabet."""
        keys = (
            stored.key.removeprefix(self._prefix)
            for stored in self._objects.list_objects(self._prefix)
        )
        names = (key.removesuffix(SNAPSHOT_SUFFIX) for key in keys if key.endswith(SNAPSHOT_SUFFIX))
        return sorted(name for name in names if is_name(name))

    def remove(self, name: str) -> int:
        """The bytes freed. Raises InvalidArgument where there is none."""
        place = self.existing(name)
        size = place.stat().st_size
        self._objects.delete(place.key)
        return size
