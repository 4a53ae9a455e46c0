"""The interface of object stores, and checks of keys that all of them share."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvkeep.errors import InvalidArgument, StoreError

ChunkFactory = Callable[[], Iterable[bytes | memoryview]]  # each call starts from the first byte
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

    Writes are atomic, and durable once they have returned. All methods are thread-safe. They raise
    StoreError if the store fails or cannot be reached, after retries where those can help. A put
    that raises StoreError (other than Conflict) has an unknown outcome: it may have been applied,
    or may still be applied later.
    """

    @property
    def url(self) -> str:
        """The URL with which `open_object_store` opens the same store."""

    def put(
        self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Write a small object, and return its ETag.

        if_absent: only if there is no object. if_match: only if the object has this ETag. Raises
        Conflict if the condition does not hold.
        """

    def put_chunks(self, key: str, iter_chunks: ChunkFactory) -> None:
        """Write a large object. iter_chunks: called once per attempt."""

    def get(self, key: str, max_bytes: int = MAX_GET_BYTES) -> tuple[bytes, str]:
        """Read an object of at most `max_bytes`; return its content and ETag. Raises NoObject."""

    def get_range(self, info: ObjectInfo, begin: int, end: int) -> memoryview:
        """Read a byte range of an object. Raises NoObject, Conflict if `info` is outdated."""

    def info(self, key: str) -> ObjectInfo:
        """Return an object's metadata, without its content. Raises NoObject."""

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a prefix, in any order. prefix: '' or words ending with '/'.

        Objects of other software, whose keys are not of this form, are left out.
        """

    def sweep_unfinished(self, prefix: str) -> list[str]:
        """Remove what killed writers left below a prefix; return it as paths in the store.

        Of a remote store there is none, except parts of uploads, which its own rules remove.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""


def too_large_error(key: str, max_bytes: int) -> StoreError:
    return StoreError(f"{key} cannot be read: it has more than {max_bytes:,} bytes")


def is_valid_key(key: str) -> bool:
    return all(_KEY_PART.fullmatch(part) for part in key.split("/"))


def checked_key(key: str) -> str:
    """Return the key. Raises InvalidArgument if it is not valid."""
    if not is_valid_key(key):
        raise InvalidArgument(
            "an object key must be words of A-Z, a-z, 0-9, '.', '_' and '-', not beginning with "
            f"'.', separated by '/'; found {key!r:.200}"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """Return the prefix. Raises InvalidArgument unless it is '' or a key followed by '/'."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgument(f"a prefix must end with '/'; found {prefix!r:.200}")
        checked_key(prefix[:-1])
    return prefix
