"""Sessions written to disk while the engine goes on."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.snapshots.snapshot import Snapshot

_log = logging.getLogger("kvkeep.engine")


class SessionSaver:
    """Writes snapshots in a thread of its own, one after the other.

    call: runs a function in the engine's thread, in which all methods here are called.
    """

    def __init__(self, keeping: SessionRegistry, call: Callable[[Callable[[], None]], object]):
        self._keeping, self._call = keeping, call
        self._writer = ThreadPoolExecutor(1, "kvkeep-save")
        self._waiting = 0

    def save(self, kept: SessionRecord) -> "Future[int]":
        """The revision that is on disk from then on. Raises InvalidArgument where there is none."""
        file, saved = self._keeping.file(kept), Future[int]()
        snapshot, revision = self._keeping.snapshot(kept), kept.revision
        kept.saving = revision
        self._waiting += 1

        def written() -> None:
            if not kept.removed:
                snapshot.save(file)
            if kept.removed:  # meanwhile, and whoever saves one of that name comes after this
                file.unlink(missing_ok=True)

        def done(work: "Future[None]") -> None:
            error = work.exception()
            self._call(lambda: self._settle(kept, revision, error))
            saved.set_result(revision) if error is None else saved.set_exception(error)

        self._writer.submit(written).add_done_callback(done)
        return saved

    def save_idle(self, seconds: float) -> None:
        """Begins to save a session that has been idle for so long, if there is one to save."""
        if self._waiting:
            return
        longest_ago = time.monotonic() - seconds
        for kept in self._keeping:
            waits = kept.dirty and kept.file is not None and not kept.busy
            if waits and kept.used < longest_ago and kept.saving != kept.revision:
                self.save(kept)
                return

    def write(self, snapshot: Snapshot, path: Path | ObjectPath) -> "Future[int]":
        """Writes a snapshot elsewhere; its bytes."""
        return self._writer.submit(snapshot.save, path)

    def save_all(self) -> None:
        """Ends with everything on disk that can be there."""
        self._writer.shutdown()
        for kept in self._keeping:
            if kept.dirty and kept.file is not None:
                try:
                    self._keeping.save(kept)
                except Exception as error:
                    _log.error("session %r could not be saved: %s", kept.name, error)

    def _settle(self, kept: SessionRecord, revision: int, error: BaseException | None) -> None:
        self._waiting -= 1
        if error is None:
            self._keeping.is_saved(kept, revision)
        else:  # tried again when it has changed, or when it must leave memory
            _log.error("session %r could not be saved: %s", kept.name, error)
