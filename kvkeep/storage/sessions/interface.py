"""The interface of session stores, and the rules for names that all of them share."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from kvkeep.errors import InvalidArgument, NoSuchSnapshot
from kvkeep.storage.objects.paths import ReadablePath

PathT_co = TypeVar("PathT_co", bound=ReadablePath, covariant=True)
SNAPSHOT_SUFFIX = ".kvkeep"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def is_valid_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name


def checked_name(name: str) -> str:
    """Return the name. Raises InvalidArgument if it is not valid."""
    if not is_valid_name(name):
        raise InvalidArgument(
            "a session name must be 1 to 100 letters, digits, '.', '_' and '-', must not begin "
            f"with '.' or contain '..'; found {name!r:.120}"
        )
    return name


def require_distinct(name: str, names: Iterable[str], kind: str = "session") -> None:
    """Raise InvalidArgument if a name is not among the names, but one that differs in case only.

    Some file systems, such as that of macOS, would store both in one file.
    """
    names, folded = set(names), name.casefold()
    if name in names:
        return
    for other in names:
        if other.casefold() == folded:
            raise InvalidArgument(
                f"{kind} {name!r} differs from {other!r}, which exists, only in upper and lower "
                "case, so some file systems would store both in one file; use another name"
            )


class SnapshotStore(Protocol[PathT_co]):
    """Snapshots by name. Writing one replaces it atomically."""

    def path(self, name: str) -> PathT_co:
        """Return a snapshot's path, which may not exist. Raises InvalidArgument for a bad name."""

    def names(self) -> list[str]:
        """Return all names, sorted."""

    def remove(self, name: str) -> int:
        """Remove a snapshot; return the bytes freed. Raises InvalidArgument if there is none."""

    def existing_path(self, name: str) -> PathT_co:
        """Return the path of a snapshot. Raises InvalidArgument, naming all snapshots, if none."""
        path = self.path(name)
        if not path.exists():
            raise self.unknown_name_error(name)
        return path

    def unknown_name_error(self, name: str) -> InvalidArgument:
        known = ", ".join(self.names()) or "none"
        return InvalidArgument(f"there is no session {name!r}; expected one of: {known}")


class LabelStore(SnapshotStore[PathT_co], Protocol[PathT_co]):
    """Snapshots by label, which are copies of sessions."""

    def unknown_name_error(self, name: str) -> NoSuchSnapshot:
        known = ", ".join(self.names())
        hint = f"; expected one of: {known}" if known else ""
        return NoSuchSnapshot(f"there is no snapshot {name!r}{hint}")


class SessionStore(SnapshotStore[PathT_co], Protocol[PathT_co]):
    """Sessions by name, each with one writer at a time.

    `SessionFolder` holds a lock file while a process works on a session, `SharedSessions` a lease
    that expires when its holder is gone. Reading needs neither.
    """

    def newest_first(self) -> Iterator[PathT_co]:
        """Yield all sessions, the last saved first."""

    def lock(self, name: str) -> AbstractContextManager[PathT_co]:
        """Keep other writers out for the block, which gets the path to save the session to.

        Raises Locked at once if another process works on the session.
        """

    def sweep(self) -> Sequence[object]:
        """Remove what killed writers left, and return the names or paths."""
