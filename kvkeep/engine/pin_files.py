"""Prefix pins on disk: saved while an engine runs, and loaded with their sessions by the next one.

Sessions without a name have no file otherwise: the pinned ones are saved in a folder beside those
with names, with an index of all pins. The index names only what is on disk. After a kill it is a
few seconds old, and so may be the text of a session: its pins then end where that text ends.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.engine.pins import PinRequest, PrefixPin, prefix_digest
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.session_files import owner_folders
from kvkeep.errors import KvkeepError, Locked
from kvkeep.storage.files.atomic import make_folder, write_json
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.sessions.interface import SNAPSHOT_SUFFIX
from kvkeep.storage.snapshots.snapshot import Snapshot

_FOLDER, _INDEX = "pinned", "pins"  # in an owner's folder
_MAX_BYTES = 2**30  # of the sessions without a name that are saved, of all owners
_BYTES_PER_SECOND = 20e6  # that saves may write on average
_CHECK_SECONDS = 1.0  # between looks for changes
_log = logging.getLogger("kvkeep.engine")


@dataclass(frozen=True)
class _SavedPin:
    """A pin in an index. expires: in seconds since 1970."""

    id: str
    session: str
    tokens: int
    seconds: float
    expires: float
    key: str
    digest: str
    hits: int


@dataclass(frozen=True)
class _SavedSession:
    """The file of a session without a name."""

    path: Path
    revision: int
    nbytes: int


class PinFiles:
    """The pins of an engine on disk, and the pinned sessions without a name.

    Used in the engine's thread; the writer of `SessionDisk` writes. Of more than 1 GiB of sessions
    those whose pins expire last are saved, and no more than 20 MB in a second, on average. An
    owner's folder that another process uses is left alone.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        folder: Path,
        post: Callable[[Callable[[], None]], object],
    ):
        """post: runs a function in the engine's thread."""
        self._registry, self._folder, self._post = registry, folder, post
        self._sessions = dict[SessionRecord, _SavedSession]()
        self._indexed = dict[str, object]()  # what an owner's index holds; None for anything
        self._locks, self._is_locked = ExitStack(), dict[str, bool]()
        self._writing: SessionRecord | None = None
        self._next_check = 0.0

    # Saving

    def save_changed(self) -> None:
        """Begin to save one session that has changed, if it is time; then update the indexes."""
        now = time.monotonic()
        if self._writing is not None or now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        self._remove_unpinned()
        self._write_indexes()
        for record in self._unsaved():
            if not record.busy and self._lock(record.owner):
                self._next_check = now + max(_CHECK_SECONDS, record.live.nbytes / _BYTES_PER_SECOND)
                self._writing = record
                self._save(record).add_done_callback(lambda _: self._post(self._note_written))
                return

    def save_all(self) -> None:
        """Save all that has changed, and wait for it."""
        self._remove_unpinned()
        for record in self._unsaved():
            if self._lock(record.owner):
                self._save(record).exception()
        self._write_indexes()
        self._registry.disk.writer.submit(lambda: None).result()
        self._locks.close()

    def _note_written(self) -> None:
        self._writing, self._next_check = None, min(self._next_check, time.monotonic())

    def _unsaved(self) -> Iterator[SessionRecord]:
        """Yield the sessions to save, those whose pins expire last before others."""
        nbytes, seen = 0, set[SessionRecord]()
        for pin in sorted(self._registry.pins, key=lambda pin: pin.expires, reverse=True):
            record = pin.record
            if record.named or record.session is None or record in seen:
                continue
            seen.add(record)
            saved = self._sessions.get(record)
            nbytes += record.live.nbytes if saved is None else saved.nbytes
            if nbytes <= _MAX_BYTES and (saved is None or saved.revision != record.revision):
                yield record

    def _save(self, record: SessionRecord) -> Future[None]:
        """Begin to write a session's file. A failure is logged, and tried again when it changes."""
        path = self._root(record.owner) / f"{record.name}{SNAPSHOT_SUFFIX}"
        self._sessions[record] = _SavedSession(path, record.revision, record.live.nbytes)
        try:
            snapshot, codec = self._registry.disk.snapshot(record), self._registry.disk.codec
        except Exception as error:  # such as too little memory
            _log.error("%s, which is pinned, could not be saved: %s", record.name, error)
            return self._registry.disk.writer.submit(lambda: None)

        def write() -> None:
            try:
                make_folder(path.parent)
                snapshot.save_by(path, codec)
            except (OSError, KvkeepError) as error:
                _log.error("%s, which is pinned, could not be saved: %s", record.name, error)

        return self._registry.disk.writer.submit(write)

    def _remove_unpinned(self) -> None:
        """Remove the files of sessions that are no longer pinned, or have a name."""
        pinned = {pin.record for pin in self._registry.pins if not pin.record.named}
        for record in [record for record in self._sessions if record not in pinned]:
            self._registry.disk.writer.submit(_unlink, self._sessions.pop(record).path)

    def _write_indexes(self) -> None:
        """Write the indexes that have changed, without the pins of unsaved sessions."""
        pins = defaultdict[str, list[PrefixPin]](list)
        for pin in self._registry.pins:
            if pin.record.named or pin.record in self._sessions:
                pins[pin.owner].append(pin)
        for owner in {*pins, *self._indexed}:
            # The record's name and not the record, which would be kept.
            content = [(pin.id, pin.record.name, pin.tokens, pin.expires) for pin in pins[owner]]
            if content == self._indexed.get(owner, []) or not self._lock(owner):
                continue
            self._indexed[owner] = content
            entries = [vars(_to_saved(pin, self._registry.pins.clock())) for pin in pins[owner]]
            self._registry.disk.writer.submit(_write_index, self._index(owner), entries)

    def _lock(self, owner: str) -> bool:
        """Lock an owner's folder of pins, once; returns whether this process has it."""
        if owner not in self._is_locked:
            try:
                self._locks.enter_context(SessionFolder(self._root(owner)).lock(_INDEX))
                self._is_locked[owner] = True
            except KvkeepError as error:
                self._is_locked[owner] = False
                reason = "another process uses it" if isinstance(error, Locked) else error
                _log.warning("pins are not kept in %s: %s", self._root(owner), reason)
        return self._is_locked[owner]

    def _root(self, owner: str) -> Path:
        return self._folder / owner / _FOLDER

    def _index(self, owner: str) -> Path:
        return self._root(owner) / f"{_INDEX}.json"

    # Loading

    def load(self) -> None:
        """Load the pins of an earlier engine, with their sessions as far as there is room.

        Those that expire last come first. Called before the engine's thread starts.
        """
        for owner_folder in owner_folders(self._folder):
            owner = owner_folder.root.name
            if self._root(owner).is_dir() and self._lock(owner):
                self._load_owner(owner)

    def _load_owner(self, owner: str) -> None:
        registry, records = self._registry, dict[str, SessionRecord | None]()
        self._indexed[owner] = None
        entries = _read_index(self._index(owner))
        for entry in sorted(entries, key=lambda entry: entry.expires, reverse=True):
            if entry.session not in records:
                records[entry.session] = self._load_session(owner, entry)
            record = records[entry.session]
            if record is not None and record.live.tokens:
                registry.pins.attach(record, [_to_pin(entry, record, registry.pins.clock())])
        kept = {saved.path for saved in self._sessions.values()}
        for path in self._root(owner).glob(f"*{SNAPSHOT_SUFFIX}"):
            if path not in kept:
                _unlink(path)

    def _load_session(self, owner: str, entry: _SavedPin) -> SessionRecord | None:
        """Load the session of a pin; return None if it is gone, or if there is no room for it."""
        registry, named = self._registry, self._registry.get(entry.session, owner)
        path = self._root(owner) / f"{Path(entry.session).name}{SNAPSHOT_SUFFIX}"
        try:
            if named is not None:
                if named.file is None or not self._has_room(named.file.path.stat().st_size):
                    return None
                registry.reserve(named, 0)
                return named
            if not path.exists() or not self._has_room(path.stat().st_size):
                return None
            snapshot = Snapshot.load(path)
            session = registry.disk.restored(snapshot, owner)
            if not self._has_room(max_session_bytes(session, 0)):
                return None
            record = registry.add(session, owner, path.stem, named=False)
            record.restore_from(snapshot.notes)
        except (OSError, KvkeepError) as error:
            _log.error("%s was not loaded: %s", entry.id, error)
            return None
        self._sessions[record] = _SavedSession(path, record.revision, session.nbytes)
        return record

    def _has_room(self, nbytes: int) -> bool:
        """Whether a session fits without the eviction of another one."""
        return self._registry.nbytes + nbytes <= self._registry.policy.limits.memory


def _write_index(path: Path, entries: list[dict[str, Any]]) -> None:
    if not entries:
        _unlink(path)
        return
    try:
        make_folder(path.parent)
        write_json(path, {"pins": entries})
    except OSError as error:
        _log.error("%s could not be written: %s", path, error)


def _read_index(path: Path) -> list[_SavedPin]:
    """Return the pins of an index that have not expired."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        entries = [_read_entry(fields) for fields in document["pins"]]
        return [entry for entry in entries if entry.expires > time.time()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        _log.error("%s was not loaded: %s", path, error)
        return []


def _read_entry(fields: Any) -> _SavedPin:
    """Return a pin of an index. Raises TypeError or ValueError for values that no pin has."""
    entry = _SavedPin(**fields)
    texts, numbers = (entry.id, entry.session, entry.key, entry.digest), (entry.tokens, entry.hits)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a pin's names must be text; found {texts}")
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"a pin's counts must be whole numbers; found {numbers}")
    PinRequest(entry.seconds, entry.tokens)  # refuses times that are out of bounds
    return entry


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _to_saved(pin: PrefixPin, now: float) -> _SavedPin:
    fields = (pin.id, pin.record.name, pin.tokens, pin.seconds, pin.expires - now + time.time())
    return _SavedPin(*fields, pin.key, pin.digest, pin.hits)


def _to_pin(entry: _SavedPin, record: SessionRecord, now: float) -> PrefixPin:
    """Return a pin of a loaded session, whose text may be shorter than it was."""
    text, digest = record.live.tokens.first(entry.tokens), entry.digest
    if len(text) < entry.tokens:
        digest = digest and prefix_digest(text, len(text))
    expires = now + min(entry.seconds, entry.expires - time.time())
    fields = (entry.id, record.owner, record, text, entry.seconds, expires, entry.key, digest)
    return PrefixPin(*fields, entry.hits)
