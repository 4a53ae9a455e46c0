"""Sessions and labelled snapshots in an object store that several machines share."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Literal

from kvkeep.errors import HeldElsewhere, InvalidArgument, Locked, NoObject, StoreError
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.interface import ChunkFactory, ObjectInfo
from kvkeep.storage.objects.paths import ObjectPath, open_object
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.driver import HEAD_FILE, SessionObjects
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.interface import (
    SNAPSHOT_SUFFIX,
    LabelStore,
    SessionStore,
    checked_name,
    is_valid_name,
)
from kvkeep.storage.sessions.lease import Lease
from kvkeep.storage.sessions.protocol import HeadVersion, LeaseRequest, Operations

LEASE_SECONDS = 30.0  # for which a session stays leased after a command was killed
_SESSIONS_PREFIX = "sessions/"
_READ_THREADS = 16  # heads read at once
_ATTEMPTS = 5  # to find a snapshot that commits keep replacing


@dataclass(frozen=True)
class SessionPath:
    """The path of a session's last committed snapshot, which is looked up at each access.

    It is a `ReadablePath`, and with a lease also a `WritablePath`: writing commits.
    """

    objects: SessionObjects
    lease: Lease | None = None
    release_on_commit: bool = False

    def __str__(self) -> str:
        return f"session {self.objects.name!r} in {self.objects.store.url}"

    @property
    def store(self) -> ObjectStore:
        return self.objects.store

    @property
    def stem(self) -> str:
        return self.objects.name

    def exists(self) -> bool:
        return self._key() is not None

    def head(self) -> SessionHead | None:
        """Read the head; None if there is no session."""
        current = self.objects.head()
        return None if current is None or current.head.removed else current.head

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Raises NoObject if nothing was committed."""
        return open_object(self.objects.store, self._info())

    def stat(self) -> ObjectInfo:
        """Raises FileNotFoundError if nothing was committed."""
        try:
            return self._info()
        except NoObject as error:
            raise FileNotFoundError(str(error)) from error

    def _info(self) -> ObjectInfo:
        for _ in range(_ATTEMPTS):
            key = self._key()
            if key is None:
                break
            with suppress(NoObject):  # replaced by a commit meanwhile
                return self.objects.store.info(key)
        raise NoObject(f"nothing was committed to {self}")

    def write_chunks(self, iter_chunks: ChunkFactory) -> None:
        """Commit a snapshot under the lease. Raises StoreError."""
        assert self.lease is not None, "a session can only be written under its lease"
        self.lease.commit(iter_chunks, self.release_on_commit)

    def _key(self) -> str | None:
        head = self.head()
        return self.objects.key(head.snapshot) if head is not None and head.snapshot else None


def sweep_all(store: ObjectStore) -> list[str]:
    """Remove what killed writers left of any owner's sessions; return it as OWNER/NAME/SNAPSHOT.

    Files that were being written when their writer was killed are removed in all of the store, and
    returned as paths in it.
    """
    unfinished = store.sweep_unfinished("")
    return unfinished + [
        f"{owner}/{removed}"
        for owner in _folder_names(store, _SESSIONS_PREFIX)
        for removed in SharedSessions(store, owner).sweep()
    ]


def _folder_names(store: ObjectStore, prefix: str) -> list[str]:
    """Return the names of the folders below a prefix: what follows it in keys up to a '/'."""
    keys = (info.key.removeprefix(prefix) for info in store.list_objects(prefix))
    return sorted({key.partition("/")[0] for key in keys})


class SharedSessions(SessionStore[SessionPath]):
    """The sessions of one owner in an object store.

    A lock is a lease: another process can acquire the session once this process has not renewed it
    for `lease_seconds`.

    owner: "0" on a server without API keys. writer: the lease holder's name for other processes.
    clock: seconds since 1970; a wrong one makes others wait too long or short, but loses no commit.
    """

    def __init__(
        self,
        store: ObjectStore,
        owner: str = "0",
        writer: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ):
        self.store, self.lease_seconds, self._clock = store, lease_seconds, clock
        self.writer = writer or f"{socket.gethostname()}:{os.getpid()}"
        self._key_prefix = f"{_SESSIONS_PREFIX}{owner}/"

    def objects_of(self, name: str) -> SessionObjects:
        """Return the objects of a session. Raises InvalidArgument for an invalid name."""
        return SessionObjects(self.store, f"{self._key_prefix}{checked_name(name)}/", name)

    def path(self, name: str) -> SessionPath:
        return SessionPath(self.objects_of(name))

    def names(self) -> list[str]:
        return sorted(path.stem for _, path in self._dated_paths())

    def newest_first(self) -> Iterator[SessionPath]:
        rows = sorted(self._dated_paths(), key=lambda row: (row[0], row[1].stem), reverse=True)
        return (path for _, path in rows)

    def _dated_paths(self) -> list[tuple[float, SessionPath]]:
        """Return the sessions with a commit, and the times of their last commits.

        A head is newer than that: leases write it, too. It dates a session that cannot be read.
        """
        times = {info.key: info.st_mtime for info in self.store.list_objects(self._key_prefix)}
        heads = list[tuple[str, SessionPath]]()
        for key in times:
            name, _, file = key.removeprefix(self._key_prefix).rpartition("/")
            if file == HEAD_FILE and is_valid_name(name):
                heads.append((key, self.path(name)))
        with ThreadPoolExecutor(_READ_THREADS) as readers:
            committed_keys = readers.map(_committed_key, heads)
            return [
                (times.get(committed_key, times[head_key]), path)
                for (head_key, path), committed_key in zip(heads, committed_keys, strict=True)
                if committed_key is not None
            ]

    @contextmanager
    def lock(self, name: str) -> Iterator[SessionPath]:
        """Lease a session for the block; create it if there is none.

        Raises Locked at once if another process holds its lease.
        """
        with self.acquire(name) as lease:
            yield SessionPath(lease.objects, lease)

    def acquire(self, name: str, create: bool = True, cached: HeadVersion | None = None) -> Lease:
        """Lease a session, until the lease is released; with `create`, create it if there is none.

        cached: the head that is probably current. Raises NoObject if there is none, Locked.
        """
        try:
            return self._lease(name, protocol.acquire(self._lease_request(), cached))
        except NoObject:
            if not create:
                raise
        except HeldElsewhere as error:
            seconds = max(0.0, error.until - self._clock())
            raise HeldElsewhere(
                f"session {name!r} is in use by {error.writer}; stop it, or wait {seconds:.0f} s "
                "after it has stopped or was killed",
                error.writer,
                error.until,
            ) from None
        try:
            return self.create(name)
        except InvalidArgument:
            raise Locked(f"another process has just created session {name!r}") from None

    def create(self, name: str) -> Lease:
        """Create and lease a session. Raises InvalidArgument if it exists."""
        return self._lease(name, protocol.create(self._lease_request()))

    def remove(self, name: str) -> int:
        size = self.existing_path(name).stat().st_size
        with self.acquire(name, create=False) as lease:
            lease.remove()
        return size

    def sweep(self) -> list[str]:
        """Remove what killed writers left; return it as NAME/SNAPSHOT."""
        swept = list[str]()
        for name in _folder_names(self.store, self._key_prefix):
            if is_valid_name(name):
                with suppress(StoreError):  # leased, removed meanwhile, or with a corrupt head
                    swept += [f"{name}/{snapshot}" for snapshot in self._sweep_session(name)]
        return swept

    def _sweep_session(self, name: str) -> list[str]:
        objects = self.objects_of(name)
        version = objects.head()
        if version is not None and version.head.removed:
            return objects.run(protocol.collect_garbage(version))
        with self.acquire(name, create=False) as lease:
            return lease.collect_garbage()

    def _lease_request(self) -> LeaseRequest:
        return LeaseRequest(self.writer, self._clock(), self.lease_seconds)

    def _lease(self, name: str, operations: Operations[HeadVersion]) -> Lease:
        """Run the operations that acquire a session, and return the lease."""
        objects = self.objects_of(name)
        version = objects.run(operations)
        return Lease(objects, version, self.writer, self.lease_seconds, self._clock)


def _committed_key(head: tuple[str, SessionPath]) -> str | None:
    """Return the key of a session's last snapshot; None if there is none.

    The key of the head if that cannot be read: the session is listed, and reading it raises.
    """
    head_key, path = head
    try:
        return path._key()
    except StoreError:
        return head_key


class SharedLabels(LabelStore[ObjectPath]):
    """The labelled snapshots of one owner in an object store.

    There are no leases: each write replaces a snapshot atomically, and the last write wins.
    """

    def __init__(self, store: ObjectStore, owner: str):
        self._store, self._key_prefix = store, f"snapshots/{owner}/"

    def path(self, name: str) -> ObjectPath:
        return ObjectPath(self._store, f"{self._key_prefix}{checked_name(name)}{SNAPSHOT_SUFFIX}")

    def names(self) -> list[str]:
        infos = self._store.list_objects(self._key_prefix)
        keys = (info.key for info in infos if info.key.endswith(SNAPSHOT_SUFFIX))
        names = (key.removeprefix(self._key_prefix).removesuffix(SNAPSHOT_SUFFIX) for key in keys)
        return sorted(name for name in names if is_valid_name(name))

    def remove(self, name: str) -> int:
        path = self.existing_path(name)
        size = path.stat().st_size
        self._store.delete(path.key)
        return size
