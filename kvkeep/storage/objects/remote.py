"""Objects in an object store, through obstore: S3 and what speaks like it, Google's, Azure's."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvkeep.errors import Conflict, InvalidArgument, KvkeepError, NoObject, StoreError
from kvkeep.storage.objects.interface import (
    SMALL,
    ChunkSource,
    ObjectInfo,
    checked_key,
    checked_prefix,
    too_large,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_SMALL = 8 << 20  # bytes that are sent in one request
_AND = " of version "  # in a tag
_TRIES = 3  # of what obstore itself does not send again, such as a put that timed out
RETRIES: "RetryConfig" = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
CLIENT: "ClientConfig" = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=60),
    "allow_http": True,  # where the environment names such an endpoint, as MinIO's at home
}


class RemoteObjectStore:
    """Of any store that obstore knows, below the prefix of its URL."""

    def __init__(self, url: str, store: "ObjectStore"):
        self._url, self._store = url.rstrip("/"), store

    @property
    def url(self) -> str:
        return self._url

    def put(
        self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        import obstore

        mode: Any = "create" if if_absent else _version(if_match) if if_match else "overwrite"
        with self._failing(key, "written"):
            done = obstore.put(
                self._store, checked_key(key), content, mode=mode, use_multipart=False
            )
            return _tag(key, done)

    def put_chunks(self, key: str, pieces: ChunkSource) -> None:
        import obstore

        for left in reversed(range(_TRIES)):
            small, rest = _begun(pieces)
            content: Any = small if rest is None else itertools.chain((small,), rest)
            try:
                with self._failing(key, "written"):
                    obstore.put(self._store, checked_key(key), content)
                return
            except StoreError:  # the same bytes once more do no harm
                if not left:
                    raise

    def get(self, key: str, most: int = SMALL) -> tuple[bytes, str]:
        import obstore

        for left in reversed(range(_TRIES)):
            with self._failing(key, "read"):
                found = obstore.get(self._store, checked_key(key))
                tag, size = _tag(key, found.meta), found.meta["size"]
                if size > most:
                    raise too_large(key, most)
                content = bytes(found.bytes())
            if len(content) == size:
                return content, tag
            if not left:
                raise StoreError(f"{key} in {self._url} cannot be read: its end did not come")
        raise AssertionError

    def get_range(self, stored: ObjectInfo, begin: int, end: int) -> memoryview:
        import obstore

        options: Any = {"range": (begin, end), "if_match": _version(stored.etag)["e_tag"]}
        for left in reversed(range(_TRIES)):
            with self._failing(stored.key, "read"):
                found = obstore.get(self._store, checked_key(stored.key), options=options)
                content = memoryview(found.bytes())
            if len(content) == end - begin:
                return content
            if not left:
                raise StoreError(f"{stored.key} in {self._url} cannot be read: it ended early")
        raise AssertionError

    def info(self, key: str) -> ObjectInfo:
        import obstore

        with self._failing(key, "read"):
            return _stored(obstore.head(self._store, checked_key(key)))

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        import obstore

        with self._failing(prefix, "listed"):
            for page in obstore.list(self._store, prefix=checked_prefix(prefix) or None):
                yield from map(_stored, page)

    def list_folders(self, prefix: str) -> list[str]:
        import obstore

        with self._failing(prefix, "listed"):
            found = obstore.list_with_delimiter(self._store, checked_prefix(prefix) or None)
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"])

    def delete(self, key: str) -> None:
        import obstore

        try:
            with self._failing(key, "deleted"):
                obstore.delete(self._store, checked_key(key))
        except NoObject:
            pass

    @contextmanager
    def _failing(self, key: str, verb: str) -> Iterator[None]:
        """obstore's errors as ours; what was wrong, without the source that it was found in."""
        from obstore import exceptions

        try:
            yield
        except KvkeepError:
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Conflict(f"the object {key} is not what the change was meant for") from error
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            raise NoObject(f"there is no object {key} in {self._url}") from error
        except (exceptions.BaseError, OSError, NotImplementedError, ValueError) as error:
            reason = str(error).partition("\n")[0][:300]
            raise StoreError(f"{key} in {self._url} cannot be {verb}: {reason}") from error


def _begun(pieces: ChunkSource) -> tuple[bytes, Iterator[bytes | memoryview] | None]:
    """All of it where that is little, which is one request then; or its beginning and the rest."""
    begin, coming = bytearray(), iter(pieces())
    for piece in coming:
        begin += piece
        if len(begin) > _SMALL:
            return bytes(begin), coming
    return bytes(begin), None


def opened(url: str) -> RemoteObjectStore:
    """Credentials and endpoints are those of the environment, as the store's own tools take them.

    Raises InvalidArgument for a URL of none, or where obstore is missing.
    """
    try:
        from obstore import exceptions
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise InvalidArgument(f"{url} needs obstore: pip install 'kvkeep[object-store]'") from error
    if url.startswith("memory://"):
        return RemoteObjectStore(url, _memories.setdefault(url.rstrip("/"), MemoryStore()))
    try:
        return RemoteObjectStore(url, from_url(url, retry_config=RETRIES, client_options=CLIENT))
    except (exceptions.BaseError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise InvalidArgument(f"{url} cannot be opened as a store: {reason}") from error


_memories: dict[str, "ObjectStore"] = {}  # of this process, by URL


def _stored(meta: Any) -> ObjectInfo:
    key = str(meta["path"])
    return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp(), _tag(key, meta))


def _tag(key: str, found: Any) -> str:
    tag = found["e_tag"]
    if not tag:
        raise StoreError(f"the store gives {key} no ETag, without which nothing in it can be kept")
    version = found["version"]  # by which Google's store knows what a change is meant for
    return f"{tag}{_AND}{version}" if version else str(tag)


def _version(tag: str) -> dict[str, str]:
    e_tag, _, version = tag.partition(_AND)
    return {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}
