"""The interface of object stores, and checks of keys that all of them share."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvkeep.errors import InvalidArgument, StoreError

ChunkSource = Callable[[], Iterable[bytes | memoryview]]  # each call starts from the first byte
MAX_GET_BYTES = 64 << 20  # default limit of `get`, which reads an object in one go
_KEY_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class ObjectInfo:
    """An object's metadata, with the names of `os.stat_result`."""

    key: str
    st_size: int  # in bytes
    st_mtime: float  # in seconds since 1970
    etag: str  # opaque; differs for different content


class ObjectStore(Protocol):
    """Objects under keys: words of A-Z, a-z, 0-9, '.', '_' and '-', joined by '/'.

    Writes are atomic and durable: readers see a complete object or none, and an object survives a
    crash once its put has returned. All methods are thread-safe. They raise StoreError if the
    store fails or cannot be reached, after retries where those can help.

    A put that raises StoreError (other than Conflict) has an unknown outcome: it may have been
    applied, or may still be applied later. A caller that must know has to read the object.
    """

    @property
    def url(self) -> str:
        """The URL with which `open_object_store` opens the same store."""

    def put(
        self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Write a small object, and return its ETag. Conditions make it a compare-and-swap.

        if_absent: only if there is no object. if_match: only if the object has this ETag. Raises
        Conflict if a condition does not hold.
        """

    def put_chunks(self, key: str, chunks: ChunkSource) -> None:
        """Write an object of any size with a bounded number of chunks in memory.

        chunks: called once per attempt.
        """

    def get(self, key: str, max_bytes: int = MAX_GET_BYTES) -> tuple[bytes, str]:
        """Read an object of at most `max_bytes`; return its content and ETag. Raises NoObject."""

    def get_range(self, stored: ObjectInfo, begin: int, end: int) -> memoryview:
        """Read a byte range of the version of an object that `stored` describes.

        Raises NoObject, and Conflict if the object was replaced.
        """

    def info(self, key: str) -> ObjectInfo:
        """Return an object's metadata. Raises NoObject."""

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a prefix, in any order. prefix: '' or words ending with '/'."""

    def list_folders(self, prefix: str) -> list[str]:
        """Return the next words of keys below a prefix that are followed by further words."""

    def delete(self, key: str) -> None:
        """Delete an object. Does nothing if there is none."""


def too_large(key: str, max_bytes: int) -> StoreError:
    """The error for an object that exceeds the limit of `get`."""
    return StoreError(f"{key} cannot be read at once: it has more than {max_bytes:,} bytes")


def checked_key(key: str) -> str:
    """Return a key. Raises InvalidArgument if it is not valid."""
    if not key or not all(_KEY_PART.fullmatch(part) for part in key.split("/")):
        raise InvalidArgument(
            "a key is words of A-Z, a-z, 0-9, '.', '_' and '-', beginning with no '.', with '/' "
            f"between them; found {key!r:.200}"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """Return a prefix. Raises InvalidArgument unless it is '' or a key followed by '/'."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgument(f"a prefix ends with '/'; found {prefix!r:.200}")
        checked_key(prefix[:-1])
    return prefix
