"""A session that this process holds: renewed while it is held, until it is let go or lost."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvkeep.errors import Moved, StoreError
from kvkeep.storage.objects.interface import ChunkSource
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.driver import SessionObjects
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.protocol import RELEASED, LeaseRequest, Operations, VersionedHead

T = TypeVar("T")


class Lease:
    """What a writer may do with a session. All methods may be called from any thread.

    seconds: for which it is held without a renewal, which comes three times as often.
    """

    def __init__(
        self,
        place: SessionObjects,
        held: VersionedHead,
        writer: str,
        seconds: float,
        clock: Callable[[], float] = time.time,
    ):
        self.place, self._version = place, held
        self._writer, self._seconds, self._clock = writer, seconds, clock
        self._at_store = threading.Lock()  # one step of this writer's at a time
        self._over = threading.Event()
        self._lost: StoreError | None = None
        self._told: list[Callable[[], None]] = []
        self._renewing = threading.Thread(
            target=self._renew, name=f"kvkeep-lease-{place.name}", daemon=True
        )
        self._renewing.start()

    @property
    def head(self) -> SessionHead:
        return self._version.head

    @property
    def version(self) -> VersionedHead:
        """The newest that is known."""
        return self._version

    @property
    def lost(self) -> StoreError | None:
        """Why nothing can be committed any more; None while it can, as far as is known."""
        return self._lost

    def on_lost(self, function: Callable[[], None]) -> None:
        """It is called, in any thread, at the moment at which nothing can be committed any more."""
        self._told.append(function)
        if self._lost is not None:
            function()

    def check(self) -> None:
        """Raises Moved, or what it was lost by."""
        if self._lost is not None:
            raise self._lost

    def commit(self, pieces: ChunkSource, release: bool = False) -> SessionHead:
        """What the pieces are is the session from now on.

        Raises Moved where it is another writer's: nothing of the pieces is kept then.
        """
        self.check()
        # Renewals go on meanwhile: they change neither epoch nor generation.
        snapshot = self.place.run(protocol.upload(self._version), pieces)
        with self._at_store:
            self.check()
            expires = RELEASED if release else self._clock() + self._seconds
            writer = "" if release else self._writer
            steps = protocol.commit(self._version, snapshot, expires, writer)
            self._version = self._tried(steps)
            if release:
                self._over.set()
            return self.head

    def remove(self) -> None:
        """There is no such session any more."""
        with self._at_store:
            self.check()
            self._tried(protocol.remove(self._version))
            self._over.set()

    def collect(self) -> list[str]:
        """Names of what was left by writers that were killed, and is gone now."""
        with self._at_store:
            self.check()
            return self._tried(protocol.collect(self._version))

    def release(self) -> None:
        """Lets go of it. A store that cannot be told will know when the lease has run out."""
        with self._at_store:
            if not self._over.is_set() and self._lost is None:
                with suppress(StoreError):
                    self._version = self.place.run(protocol.release(self._version))
            self._over.set()

    def _tried(self, steps: Operations[T]) -> T:
        try:
            return self.place.run(steps)
        except StoreError as error:
            self._lose(error)
            raise self._lost or error from error

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / 3):
            with self._at_store:
                if self._over.is_set() or self._lost is not None:
                    return
                who = LeaseRequest(self._writer, self._clock(), self._seconds)
                try:
                    self._version = self.place.run(protocol.renew(self._version, who))
                except Moved as error:
                    self._lose(error)
                except StoreError:  # another renewal may do; whether it is lost a commit tells
                    continue

    def _lose(self, error: StoreError) -> None:
        name = self.place.name
        if isinstance(error, Moved):
            self._lost = Moved(
                f"session {name!r} is another's now: {error}. What was done here since generation "
                f"{self.head.gen} is not kept; send the request again"
            )
        else:
            self._lost = StoreError(
                f"session {name!r} could not be committed, and whether it was is not known: "
                f"{error}. Look at it before you send the request again, or send it with an "
                "Idempotency-Key"
            )
        self._over.set()
        for function in self._told:
            function()
