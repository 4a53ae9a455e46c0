"""Snapshots of sessions, written to disk while the engine continues."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry

_log = logging.getLogger("kvkeep.engine")


class SessionSaver:
    """A thread that writes snapshots one after the other. Used in the engine's thread."""

    def __init__(self, registry: SessionRegistry, call: Callable[[Callable[[], None]], object]):
        """call: runs a function in the engine's thread."""
        self._registry, self._call = registry, call
        self._writer = ThreadPoolExecutor(1, "kvkeep-save")
        self._pending = 0

    def save(self, record: SessionRecord) -> "Future[int]":
        """Begin to save a session; the result is the revision on disk. Raises InvalidArgument."""
        file, result = record.require_file().path, Future[int]()
        snapshot, revision = self._registry.snapshot(record), record.revision
        record.saving_revision = revision
        self._pending += 1

        def write() -> None:
            if not record.removed:
                snapshot.save(file)
            if record.removed:  # meanwhile; a new session of that name is saved after this
                file.unlink(missing_ok=True)

        def written(work: "Future[None]") -> None:
            error = work.exception()
            self._call(lambda: self._settle(record, revision, error))
            result.set_result(revision) if error is None else result.set_exception(error)

        self._writer.submit(write).add_done_callback(written)
        return result

    def save_idle(self, seconds: float) -> None:
        """Begin to save a changed session that has been idle for so long, if there is one."""
        if self._pending:
            return
        idle_since = time.monotonic() - seconds
        for record in self._registry:
            unsaved = record.dirty and record.saving_revision != record.revision
            idle = not record.busy and record.last_used < idle_since
            if unsaved and idle and record.file is not None:
                self.save(record)
                return

    def snapshot(self, record: SessionRecord, label: str) -> "Future[int]":
        """Write a snapshot of a session under a label; the result is its size in bytes."""
        path = self._registry.snapshots_of(record.owner).path(label)
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return self._writer.submit(self._registry.snapshot(record).save, path)

    def save_all(self) -> None:
        """Finish what was begun, and save all other changes."""
        self._writer.shutdown()
        for record in self._registry:
            if record.dirty and record.file is not None:
                try:
                    self._registry.save(record)
                except Exception as error:
                    _log.error("session %r could not be saved: %s", record.name, error)

    def _settle(self, record: SessionRecord, revision: int, error: BaseException | None) -> None:
        self._pending -= 1
        if error is None:
            record.mark_saved(revision)
        else:  # tried again when it has changed, or when it is evicted
            _log.error("session %r could not be saved: %s", record.name, error)
