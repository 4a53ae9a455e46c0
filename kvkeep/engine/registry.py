"""The sessions of an engine: found by name, held within a memory limit, moved to disk and back."""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvkeep.cache.storage import nbytes
from kvkeep.engine.record import SessionRecord, max_session_bytes
from kvkeep.errors import InvalidArgument, NoRoom, NoSuchSession, StoreError
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.objects.paths import ObjectPath, Source
from kvkeep.storage.sessions.folder import SessionFolder
from kvkeep.storage.snapshots.snapshot import Snapshot, describe

NOTES = "engine"  # of a snapshot: what the engine knows of its session
_OWNER = re.compile(r"[a-z0-9]{1,64}")
_UNSAVED = ".unsaved"


class Labels(Protocol):
    """One owner's snapshots, by label; a `SessionFolder` has such."""

    def path(self, name: str) -> Path | ObjectPath: ...
    def existing(self, name: str) -> Path | ObjectPath: ...
    def names(self) -> list[str]: ...
    def remove(self, name: str) -> int: ...


class SessionRegistry:
    """Whose sessions there are, and where. To be used in the engine's thread alone.

    folder: where sessions go that are moved out of memory or saved; None for nowhere: then none is
    moved, and all are lost with the process. limit: bytes that the cells of all may take.
    snapshots: an owner's, by label; None for those in the folder.

    unreadable: files that are no sound snapshots, and why. never_saved: owners and names of
    sessions that a killed engine had, and had not saved.
    """

    def __init__(
        self,
        model: Model,
        folder: Path | None,
        limit: int,
        snapshots: Callable[[str], Labels] | None = None,
    ):
        if snapshots is None and folder is not None:
            snapshots = partial(_labels, folder)
        self._snapshots = snapshots
        self._model, self._folder, self.limit = model, folder, limit
        self._all: dict[tuple[str, str], SessionRecord] = {}
        self._locks: dict[SessionRecord, ExitStack] = {}
        self.unreadable: dict[Path, str] = {}
        self.never_saved: list[tuple[str, str]] = []  # owner and name
        if folder is not None:
            self._find(folder)

    @property
    def losses(self) -> list[str]:
        """What of the sessions in the folder could not be had, a line for each."""
        return [
            *(f"{file} is left where it is: {why}" for file, why in self.unreadable.items()),
            *(f"session {name!r} was never saved, and is lost" for _, name in self.never_saved),
            *(
                f"session {kept.name!r} goes on from revision {kept.saved}: what came after it, up "
                f"to {kept.lost_revision}, was not saved"
                for kept in self
                if kept.lost_revision is not None
            ),
        ]

    # By name

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._all.values()))

    def of(self, owner: str) -> list[SessionRecord]:
        """All of one owner's, the one used last first."""
        found = [kept for kept in self if kept.owner == owner]
        return sorted(found, key=lambda kept: kept.used, reverse=True)

    def has(self, name: str, owner: str) -> bool:
        return (owner, name) in self._all

    def find(self, name: str, owner: str) -> SessionRecord:
        """Raises NoSuchSession, also for one that is somebody else's."""
        kept = self._all.get((owner, name))
        if kept is None:
            raise NoSuchSession(f"there is no session {name!r}")
        return kept

    def add(
        self,
        session: Session,
        owner: str,
        name: str | None = None,
        parent: str | None = None,
        named: bool = True,
        notes: dict[str, Any] | None = None,
    ) -> SessionRecord:
        """Keeps a session from now on; name: None for one of its own.

        Raises InvalidArgument for a name that is none or is taken, Locked where another process
        uses a session of that name in the same folder, NoRoom.
        """
        if not _OWNER.fullmatch(owner):
            raise InvalidArgument(f"an owner is 1 to 64 of a-z and 0-9; found {owner!r}")
        name = name or f"s-{secrets.token_hex(8)}"
        file = None
        if named and self._folder is not None:
            file = self._of_owner(owner).path(name)
        if (owner, name) in self._all:
            raise InvalidArgument(f"there is a session {name!r} already")
        kept = SessionRecord(name, owner, named, file, session, parent=parent, notes=notes or {})
        # Where snapshots are in a store and sessions in no folder, what must last is in the store.
        kept.evictable = named and file is None and self._snapshots is not None
        self.reserve(kept, 0)
        if file is not None:
            self._lock(kept)
            self._mark(kept, file)
        self._all[owner, name] = kept
        return kept

    def welcome(
        self, session: Session, owner: str, name: str, notes: dict[str, Any]
    ) -> SessionRecord:
        """Keeps a session as another engine had it, in the place of one of that name.

        notes: of the snapshot that it was restored from. Raises Busy, NoRoom.
        """
        if self.has(name, owner):
            there = self.find(name, owner)
            if not there.visits:
                raise InvalidArgument(f"this server has a session {name!r} of its own")
            self.remove(there)
        others = {key: value for key, value in notes.items() if key != NOTES}
        kept = self.add(session, owner, name, notes=others)
        kept.goes_on(notes.get(NOTES, {}))
        return kept

    def remove(self, kept: SessionRecord) -> None:
        """Forgets a session, its file too."""
        kept.require_idle()
        del self._all[kept.owner, kept.name]
        kept.session, kept.removed = None, True
        if kept.file is not None:
            _marker(kept.file).unlink(missing_ok=True)
            with self._locks.pop(kept):
                self._of_owner(kept.owner).discard(kept.name)

    # Within the limit

    @property
    def nbytes(self) -> int:
        """What all sessions in memory may come to take: at work what was reserved for them, else
        what they hold, what several share counted once."""
        busy = [kept for kept in self if kept.busy]
        idle = [kept.live.cache for kept in self if kept.session is not None and not kept.busy]
        held = nbytes([segment for cache in idle for segment in cache.all_segments])
        return held + sum(kept.reserved for kept in busy)

    def shared_bytes(self, kept: SessionRecord) -> int:
        """Bytes of a session's storage that other sessions look at, too."""
        others = {
            segment.block.storage
            for other in self
            if other is not kept and other.session is not None
            for segment in other.session.cache.all_segments
        }
        own = {segment.block.storage for segment in kept.live.cache.all_segments}
        return sum(storage.nbytes for storage in own & others)

    def reserve(self, kept: SessionRecord, tokens: int | None, times: int = 1) -> None:
        """Makes room for what so many like the session may come to take with so many more tokens.

        Sessions that nobody asked for by name go first, then named ones go to disk, of each kind
        the one used longest ago. Raises NoRoom where all that is left is pinned or at work.
        """
        session = self.back(kept)
        wanted = times * max_session_bytes(session, tokens)
        if wanted > self.limit:
            raise NoRoom(
                f"the session could take {wanted / 1e6:,.0f} MB, and the engine has "
                f"{self.limit / 1e6:,.0f} MB for all: take a smaller max_kv_size, or fewer tokens",
                retry_after=float("inf"),
            )
        known = self._all.get((kept.owner, kept.name)) is kept and not kept.busy
        own = session.cache.nbytes if known else 0
        candidates = self._may_go(kept)
        while self.nbytes - own + wanted > self.limit:
            if not candidates:
                raise NoRoom(
                    f"{wanted / 1e6:,.0f} MB are wanted, and of {self.limit / 1e6:,.0f} MB "
                    f"{self.nbytes / 1e6:,.0f} are taken by sessions at work, or pinned"
                )
            self.make_room(candidates.pop())
        kept.reserved = wanted

    def reserve_idle(self, kept: SessionRecord) -> None:
        """Makes room for a session to be in memory, as it is."""
        if not kept.busy:
            self.reserve(kept, 0)

    def _may_go(self, but: SessionRecord) -> list[SessionRecord]:
        """The one to go first is the last."""
        found = [kept for kept in self if kept is not but and kept.may_go]
        return sorted(found, key=lambda kept: (kept.named, kept.used), reverse=True)

    def make_room(self, kept: SessionRecord) -> None:
        """Takes an idle session out of memory; a named one is on disk by then, or at home."""
        if not kept.named or kept.visits or kept.evictable:
            self.remove(kept)
            return
        if kept.dirty:
            self.save(kept)
        kept.session = None

    # To disk and back

    def back(self, kept: SessionRecord) -> Session:
        """The session, read from its file where it is not in memory.

        Raises StoreError and its kinds for a file that is not sound.
        """
        if kept.session is None:
            assert kept.file is not None
            kept.session = self._model.restore(Snapshot.load(kept.file))
        return kept.session

    def save(self, kept: SessionRecord) -> int:
        """Writes the session to its file; returns its bytes. Raises StoreError."""
        written = self.snapshot(kept).save(self.file(kept))
        self.is_saved(kept, kept.revision)
        return written

    def snapshot(self, kept: SessionRecord) -> Snapshot:
        """What `save` writes, for who writes it elsewhere and then says so by `is_saved`."""
        notes = {
            "name": kept.name,
            "revision": kept.revision,
            "evaluated": kept.evaluated,
            "sampled": kept.sampled,
            "changed": kept.changed,
            "parent": kept.parent,
            "pinned": kept.pinned,
            "created": kept.created,
        }
        return replace(self.back(kept).snapshot(), notes={**kept.notes, NOTES: notes})

    def is_saved(self, kept: SessionRecord, revision: int) -> None:
        kept.saved = revision
        if not kept.dirty and kept.file is not None:
            _marker(kept.file).unlink(missing_ok=True)

    def changed(self, kept: SessionRecord) -> None:
        """A session was changed: a kill is to find that out, should it come before the save."""
        if kept.file is not None:
            self._mark(kept, kept.file)

    def tell_again(self, kept: SessionRecord, notes: dict[str, Any]) -> None:
        """What a snapshot knows of the session that it was taken of, for the one made of it."""
        engine = notes.get(NOTES, {})
        kept.notes = {key: value for key, value in notes.items() if key != NOTES}
        kept.evaluated = engine.get("evaluated", 0)
        kept.sampled = engine.get("sampled", 0)
        kept.changed = engine.get("changed", "")
        kept.parent = engine.get("name")

    def snapshot_session_name(self, file: Source) -> str | None:
        """The name of the session that a snapshot was taken of. Raises StoreError."""
        name = describe(file).get("notes", {}).get(NOTES, {}).get("name")
        return name if isinstance(name, str) else None

    def snapshots_of(self, owner: str) -> Labels:
        """Raises InvalidArgument where the engine keeps nothing on disk."""
        if self._snapshots is None:
            raise InvalidArgument("the engine has no folder for snapshots")
        return self._snapshots(owner)

    def _mark(self, kept: SessionRecord, file: Path) -> None:
        tokens = len(kept.live.tokens)
        marker, text = _marker(file), json.dumps({"revision": kept.revision, "tokens": tokens})
        beside = marker.with_suffix(f"{marker.suffix}.new")
        beside.write_text(text, encoding="utf-8")  # not synced: it is against kills, not power cuts
        beside.replace(marker)

    def file(self, kept: SessionRecord) -> Path:
        """Where it is saved. Raises InvalidArgument where nothing is."""
        if kept.file is None:
            raise InvalidArgument(
                f"session {kept.name!r} cannot be saved: the engine has no folder for sessions"
            )
        return kept.file

    def _of_owner(self, owner: str) -> SessionFolder:
        assert self._folder is not None
        return SessionFolder(self._folder / owner)

    def _lock(self, kept: SessionRecord) -> None:
        self._locks[kept] = stack = ExitStack()
        stack.enter_context(self._of_owner(kept.owner).lock(kept.name))

    def _find(self, folder: Path) -> None:
        """All sessions that are in the folder, none of them in memory."""
        for place in sorted(folder.iterdir()) if folder.is_dir() else ():
            if place.is_dir() and _OWNER.fullmatch(place.name):
                sessions = SessionFolder(place)
                sessions.sweep()
                names = sessions.names()
                for name in names:
                    self._take_over(place.name, name, sessions.path(name))
                for marker in place.glob(f"*{_UNSAVED}"):
                    if marker.stem not in names:
                        self._tell_lost(sessions, marker)

    def _tell_lost(self, sessions: SessionFolder, marker: Path) -> None:
        """Of a session that has no file. Raises Locked where an engine that runs has it."""
        with (
            suppress(InvalidArgument),
            sessions.lock(marker.stem),
        ):  # by a name that is none: not ours
            marker.unlink(missing_ok=True)
            self.never_saved.append((marker.parent.name, marker.stem))

    def _take_over(self, owner: str, name: str, file: Path) -> None:
        try:
            known = describe(file).get("notes", {})
        except StoreError as error:
            self.unreadable[file] = str(error)  # it stays where it is, and nobody is given it
            return
        engine = known.get(NOTES, {})
        kept = SessionRecord(name, owner, True, file, None, notes=known)
        kept.notes.pop(NOTES, None)
        self._lock(kept)  # whoever has it has its marker, too
        marked = _marked(file)
        kept.goes_on(engine)
        if marked > kept.revision:
            kept.lost_revision = marked
        _marker(file).unlink(missing_ok=True)
        self._all[owner, name] = kept

    def close(self) -> None:
        """Lets other processes use the sessions."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()


def _labels(folder: Path, owner: str) -> SessionFolder:
    return SessionFolder(folder / owner / "snapshots")


def _marker(file: Path) -> Path:
    return file.with_name(f"{file.stem}{_UNSAVED}")


def _marked(file: Path) -> int:
    """The revision that a session had come to; 0 where all of it was saved."""
    try:
        return int(json.loads(_marker(file).read_text(encoding="utf-8"))["revision"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0
