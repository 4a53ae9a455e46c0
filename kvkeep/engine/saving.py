"""Saving of an engine's sessions while it serves requests."""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.errors import StoreError
from kvkeep.storage.files.atomic import make_folder
from kvkeep.storage.sessions.interface import require_distinct

_log = logging.getLogger("kvkeep.engine")
_RETRY_FACTOR = 15
_MAX_PAUSE = 0.5  # seconds between two looks at all sessions, if none was to be saved


class SessionSaver:
    """Saves sessions in other threads, one at a time. Called in the engine's thread."""

    def __init__(self, registry: SessionRegistry, post: Callable[[Callable[[], None]], object]):
        """post: runs a function in the engine's thread."""
        self._registry, self._post = registry, post
        # Uploads of snapshots must not delay an eviction, which waits for the disk's writer.
        self._uploader = ThreadPoolExecutor(1, "kvkeep-snapshot")
        self._pending_saves = 0
        self._next_look = -math.inf  # time before which `save_idle` does nothing

    def save(self, record: SessionRecord) -> Future[int]:
        """Begin to save a session; the result is the saved revision. Raises InvalidArgument.

        The future also raises what a snapshot raises, such as OutOfMemory.
        """
        path, result = record.require_file().path, Future[int]()
        result.set_running_or_notify_cancel()  # a caller that is gone cancels no save
        if record.session is None:  # it was saved when it was evicted
            result.set_result(record.revision)
            return result
        record.saving_revision, record.save_failed_at = (revision := record.revision), math.inf
        try:
            snapshot = self._registry.disk.snapshot(record)
        except Exception as error:  # such as too little memory
            self._note_failed(record, error)
            result.set_exception(error)
            return result
        self._pending_saves += 1

        def write() -> None:
            if not record.removed:
                snapshot.save_by(path, self._registry.disk.codec)
            if record.removed:  # during the write; a new session of that name is saved later
                path.unlink(missing_ok=True)

        def on_written(writing: Future[None]) -> None:
            error = writing.exception()
            self._post(lambda: self._note_saved(record, revision, error))
            result.set_result(revision) if error is None else result.set_exception(error)

        self._registry.disk.writer.submit(write).add_done_callback(on_written)
        return result

    def save_idle(self, seconds: float) -> None:
        """Begin to save one session whose last change was `seconds` ago, if it is idle.

        A save that failed, as on a full disk, is tried again after `_RETRY_FACTOR` times as long.
        There may be many sessions: if none is to be saved, the next look at them is a quarter of
        `seconds` later, at most `_MAX_PAUSE`. Earlier calls do nothing.
        """
        now = time.monotonic()
        if self._pending_saves or now < self._next_look:
            return
        changed_before, failed_before = now - seconds, now - _RETRY_FACTOR * seconds
        for record in self._registry:
            is_due = record.saving_revision != record.revision
            has_unsaved = record.dirty and (is_due or record.save_failed_at < failed_before)
            is_idle = not record.busy and record.last_changed < changed_before
            if has_unsaved and is_idle and record.file is not None:
                self.save(record)
                return
        self._next_look = now + min(_MAX_PAUSE, seconds / 4)

    def snapshot(self, record: SessionRecord, label: str) -> Future[int]:
        """Write a snapshot of a session under a label; the result is its size in bytes.

        Raises StoreError if there can be no folder for it. The future raises NoRoom beyond the
        limit of an owner's snapshots, and InvalidArgument for a new label in a folder that differs
        from another only in case.
        """
        disk, policy = self._registry.disk, self._registry.policy
        path = (labelled := disk.snapshots_of(record.owner)).path(label)
        if isinstance(path, Path):
            try:
                make_folder(path.parent)
            except OSError as error:
                raise StoreError(
                    f"snapshot {label!r} cannot be stored in {path.parent} "
                    f"({error.strerror or error}): make it a folder that can be written"
                ) from error
        snapshot = disk.snapshot(record)

        def write() -> int:
            labels = labelled.names()
            policy.require_snapshot_slot(label, labels)
            if isinstance(path, Path):
                require_distinct(label, labels, "snapshot")
            return snapshot.save_by(path, disk.codec)

        return self._uploader.submit(write)

    def save_all(self) -> None:
        """Save all changes, after the saves in progress, and wait for it."""
        for record in self._registry:
            if record.file is not None and (record.dirty or record.later is not None):
                try:
                    if record.session is None:
                        self._registry.disk.save_later(record)
                    else:
                        self._registry.disk.save(record)
                except Exception as error:
                    self._note_failed(record, error)

    def close(self) -> None:
        """Wait for all files that are being written, and end the threads that write them."""
        self._registry.disk.writer.shutdown()
        self._uploader.shutdown()

    def _note_saved(
        self, record: SessionRecord, revision: int, error: BaseException | None
    ) -> None:
        self._pending_saves -= 1
        if error is None:
            record.mark_saved(revision)
        else:
            self._note_failed(record, error)

    def _note_failed(self, record: SessionRecord, error: BaseException) -> None:
        """Log a failure. It is tried again after a change, at an eviction, or after some time."""
        record.save_failed_at = time.monotonic()
        _log.error("session %r could not be saved: %s", record.name, error)
