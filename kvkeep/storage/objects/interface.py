"""What kvkeep asks of a store of objects, whichever it is."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvkeep.errors import InvalidArgument, StoreError

ChunkSource = Callable[[], Iterable[bytes | memoryview]]
SMALL = 64 << 20  # bytes that are read at once where nobody says how many
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class ObjectInfo:
    """What a store says of an object.

    size: in bytes. modified: seconds since 1970. tag: another one for any other content; of no
    meaning beside that.
    """

    key: str
    size: int
    modified: float
    etag: str


class ObjectStore(Protocol):
    """Objects under keys: words of A-Z, a-z, 0-9, '.', '_' and '-' with '/' between them.

    An object is there whole or not at all, for whoever reads, and survives a crash from the moment
    at which its put has returned. Each method may be called from any thread, raises StoreError
    where the store fails or cannot be reached, and has tried again by then where that helps.

    A put that raises StoreError, and is no Conflict, may have been done all the same, and may even
    be done later: whoever must know reads what is there.
    """

    @property
    def url(self) -> str:
        """By which `open_object_store` opens it again."""

    def put(
        self,
        key: str,
        content: bytes,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Writes a small object; its tag. Conditions are checked and met in one step.

        if_absent: only where there is none. if_match: only where that one is there still. Raises
        Conflict where a condition does not hold.
        """

    def put_chunks(self, key: str, pieces: ChunkSource) -> None:
        """Writes an object of any size. pieces: gives all of it from the beginning, each time it is
        called; no more than some pieces are in memory at a time."""

    def get(self, key: str, most: int = SMALL) -> tuple[bytes, str]:
        """All of an object of at most so many bytes, and its tag. Raises NoObject."""

    def get_range(self, stored: ObjectInfo, begin: int, end: int) -> memoryview:
        """Bytes of the very object that was looked at. Raises NoObject, Conflict where there is
        another by that key now."""

    def info(self, key: str) -> ObjectInfo:
        """Raises NoObject."""

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a prefix: '' or words that end with '/'. In no order."""

    def list_folders(self, prefix: str) -> list[str]:
        """The words that come next in the keys below a prefix and have more behind them."""

    def delete(self, key: str) -> None:
        """There is no such object then, whether there was one or not."""


def too_large(key: str, most: int) -> StoreError:
    return StoreError(f"{key} cannot be read at once: it has more than {most:,} bytes")


def checked_key(key: str) -> str:
    """Raises InvalidArgument for what is no key."""
    if not key or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise InvalidArgument(
            "a key is words of A-Z, a-z, 0-9, '.', '_' and '-', beginning with no '.', with '/' "
            f"between them; found {key!r:.200}"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """Raises InvalidArgument for what is neither '' nor a key with '/' at its end."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgument(f"a prefix ends with '/'; found {prefix!r:.200}")
        checked_key(prefix[:-1])
    return prefix
