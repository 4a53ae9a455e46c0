"""Prefix pins on disk: saved when an engine closes, and loaded with their sessions by the next.

Sessions without a name have no file otherwise: the pinned ones are saved in a folder beside those
with names, with an index of all pins. The index is removed once it is read. So after a kill there
are no pins, rather than old ones.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.engine.pins import PrefixPin
from kvkeep.engine.record import SessionRecord, max_session_bytes
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.session_files import owner_folders
from kvkeep.errors import KvkeepError
from kvkeep.storage.files.atomic import write_json
from kvkeep.storage.sessions.interface import SNAPSHOT_SUFFIX
from kvkeep.storage.snapshots.snapshot import Snapshot

_FOLDER, _INDEX = "pinned", "pins.json"  # in an owner's folder
_MAX_BYTES = 2**30  # of the sessions without a name that are saved, of all owners
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


def save_pins(registry: SessionRegistry, folder: Path) -> None:
    """Save all pins that have not expired, and the pinned sessions that have no name.

    Of more than 1 GiB of such sessions those whose pins expire last are saved.
    """
    pins = sorted(registry.pins, key=lambda pin: pin.expires, reverse=True)
    saved, nbytes = dict[str, list[_SavedPin]](), 0
    to_wall_clock = time.time() - registry.pins.clock()
    paths = dict[SessionRecord, Path]()
    for pin in pins:
        record = pin.record
        if not record.named and record not in paths:
            if record.session is None or nbytes + record.live.nbytes > _MAX_BYTES:
                continue
            path = folder / pin.owner / _FOLDER / f"{record.name}{SNAPSHOT_SUFFIX}"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                registry.snapshot(record).save_by(path, registry.codec)
            except (OSError, KvkeepError) as error:
                _log.error("%s could not be saved: %s", pin.id, error)
                continue
            paths[record], nbytes = path, nbytes + record.live.nbytes
        fields = (pin.id, record.name, pin.tokens, pin.seconds, pin.expires + to_wall_clock)
        entry = _SavedPin(*fields, pin.key, pin.digest, pin.hits)
        saved.setdefault(pin.owner, []).append(entry)
    for owner, entries in saved.items():
        with suppress(OSError):
            index = folder / owner / _FOLDER / _INDEX
            index.parent.mkdir(parents=True, exist_ok=True)
            write_json(index, {"pins": [vars(entry) for entry in entries]})


def load_pins(registry: SessionRegistry, folder: Path) -> None:
    """Load the pins that an earlier engine saved, with their sessions as far as there is room.

    Those that expire last come first.
    """
    for owner_folder in owner_folders(folder):
        pinned_folder, owner = owner_folder.root / _FOLDER, owner_folder.root.name
        records = dict[str, SessionRecord | None]()
        for entry in _read_index(pinned_folder / _INDEX):
            if entry.session not in records:
                records[entry.session] = _load_session(registry, owner, pinned_folder, entry)
            if (record := records[entry.session]) is not None:
                registry.pins.attach(record, [_pin(entry, record, registry.pins.clock())])
        for path in pinned_folder.glob(f"*{SNAPSHOT_SUFFIX}"):
            path.unlink(missing_ok=True)


def _read_index(path: Path) -> Iterator[_SavedPin]:
    """Yield the pins of an index that have not expired, and remove the index."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        entries = [_SavedPin(**fields) for fields in document["pins"]]
    except FileNotFoundError:
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        _log.error("%s was not loaded: %s", path, error)
        return
    yield from (entry for entry in entries if entry.expires > time.time())


def _load_session(
    registry: SessionRegistry, owner: str, pinned_folder: Path, entry: _SavedPin
) -> SessionRecord | None:
    """Load the session of a pin; return None if it is gone, or if there is no room for it."""
    named = registry.get(entry.session, owner)
    path = pinned_folder / f"{Path(entry.session).name}{SNAPSHOT_SUFFIX}"
    try:
        if named is not None:
            if named.file is None or not _has_room(registry, named.file.path.stat().st_size):
                return None
            registry.reserve(named, 0)
            return named
        if not path.exists() or not _has_room(registry, path.stat().st_size):
            return None
        snapshot = Snapshot.load(path)
        session = registry.restored(snapshot, owner)
        if not _has_room(registry, max_session_bytes(session, 0)):
            return None
        record = registry.add(session, owner, named=False)
        record.restore_from(snapshot.notes)
        return record
    except (OSError, KvkeepError) as error:
        _log.error("%s was not loaded: %s", entry.id, error)
        return None


def _has_room(registry: SessionRegistry, nbytes: int) -> bool:
    """Whether a session fits without the eviction of another one."""
    return registry.nbytes + nbytes <= registry.policy.limits.memory


def _pin(entry: _SavedPin, record: SessionRecord, now: float) -> PrefixPin:
    expires = now + min(entry.seconds, entry.expires - time.time())
    return PrefixPin(
        *(entry.id, record.owner, record, entry.tokens, entry.seconds, expires),
        *(entry.key, entry.digest, entry.hits),
    )
