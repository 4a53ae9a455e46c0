"""A held lease: renewed in the background until it is released or lost."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvkeep.errors import Moved, StoreError
from kvkeep.storage.objects.interface import ChunkFactory
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.driver import SessionObjects
from kvkeep.storage.sessions.head import SessionHead, new_snapshot_name
from kvkeep.storage.sessions.protocol import RELEASED, HeadVersion, LeaseRequest, Operations

T = TypeVar("T")


class Lease:
    """The exclusive right of a writer to commit to a session. All methods are thread-safe.

    objects: the head and snapshots of the session. version: the newest head that this writer has
    put. writer: its name. seconds: the duration of the lease, which a thread renews after a third
    of it. clock: returns seconds since 1970. failure: the error by which the lease was lost; None
    while a commit may still succeed.
    """

    def __init__(
        self,
        objects: SessionObjects,
        version: HeadVersion,
        writer: str,
        seconds: float,
        clock: Callable[[], float] = time.time,
    ):
        self.objects, self.version = objects, version
        self._writer, self._seconds, self._clock = writer, seconds, clock
        self._store_lock = threading.Lock()  # held while a protocol function that writes runs
        self._ended = threading.Event()
        self.failure: StoreError | None = None
        self._lost_callbacks: list[Callable[[], object]] = []
        self._renewal_thread = threading.Thread(
            target=self._renew, name=f"kvkeep-lease-{objects.name}", daemon=True
        )
        self._renewal_thread.start()

    @property
    def head(self) -> SessionHead:
        return self.version.head

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Register a function to call, in any thread, when the lease is lost."""
        self._lost_callbacks.append(callback)
        if self.failure is not None:
            callback()

    def check(self) -> None:
        """Raise Moved, or the StoreError by which the lease was lost."""
        if self.failure is not None:
            raise self.failure

    def commit(self, iter_chunks: ChunkFactory, release: bool = False) -> SessionHead:
        """Upload a snapshot and make it the session's content.

        iter_chunks: yields the snapshot file's bytes, once per attempt. release: whether to release
        the lease in the same operation. Raises Moved if another writer has taken over.
        """
        self.check()
        # Renewals continue during the upload: they change neither epoch nor generation.
        snapshot = new_snapshot_name(self.head)
        self.objects.upload(snapshot, iter_chunks)
        with self._store_lock:
            self.check()
            expires = RELEASED if release else self._clock() + self._seconds
            writer = "" if release else self._writer
            self.version = self._run(protocol.commit(self.version, snapshot, expires, writer))
            if release:
                self._ended.set()
            return self.head

    def remove(self, request: str = "") -> None:
        """Remove the session. Ends the lease. request: see `protocol.remove`."""
        with self._store_lock:
            self.check()
            self._run(protocol.remove(self.version, request))
            self._ended.set()

    def collect_garbage(self) -> list[str]:
        """Garbage-collect snapshots that killed writers left; return the names of the deleted."""
        with self._store_lock:
            self.check()
            return self._run(protocol.collect_garbage(self.version))

    def release(self) -> None:
        """End the lease, and remove the session if nothing was ever committed to it.

        If the store cannot be reached, the lease ends by expiring.
        """
        with self._store_lock:
            if not self._ended.is_set() and self.failure is None:
                with suppress(StoreError):
                    if self.head.snapshot:
                        self.version = self.objects.run(protocol.release(self.version))
                    else:
                        self.objects.run(protocol.remove(self.version))
            self._ended.set()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _run(self, operations: Operations[T]) -> T:
        """Run a protocol function. A failure loses the lease: the outcome may be unknown."""
        try:
            return self.objects.run(operations)
        except StoreError as error:
            self._mark_lost(error)
            raise self.failure or error from error

    def _renew(self) -> None:
        """Renew the lease until it has ended: what the renewal thread runs."""
        while not self._ended.wait(self._seconds / 3):
            with self._store_lock:
                if self._ended.is_set() or self.failure is not None:
                    return
                request = LeaseRequest(self._writer, self._clock(), self._seconds)
                try:
                    self.version = self.objects.run(protocol.renew(self.version, request))
                except Moved as error:
                    self._mark_lost(error)
                except StoreError:  # a later renewal may succeed; if not, a commit will fail
                    continue

    def _mark_lost(self, error: StoreError) -> None:
        name = self.objects.name
        if isinstance(error, Moved):
            self.failure = Moved(
                f"the lease on session {name!r} was lost: {error}. Changes since generation "
                f"{self.head.gen} were not saved; send the request again"
            )
        else:
            self.failure = StoreError(
                f"it is unknown whether session {name!r} was committed: {error}. Check the session "
                "before you send the request again, or send it with an Idempotency-Key"
            )
        self._ended.set()
        for callback in self._lost_callbacks:
            callback()
