"""Remote object stores through obstore: S3 and compatible stores, Google Cloud Storage, Azure.

obstore is an optional dependency; `open_object_store` imports this module when it is needed.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from kvkeep.errors import Conflict, InvalidArgument, KvkeepError, NoObject, StoreError
from kvkeep.storage.objects.interface import (
    MAX_GET_BYTES,
    ChunkFactory,
    ObjectInfo,
    checked_key,
    checked_prefix,
    is_valid_key,
    too_large_error,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_SINGLE_REQUEST_BYTES = 8 << 20  # up to which an object is uploaded in one request
_VERSION_SEPARATOR = " of version "  # between e_tag and version in our ETags
_ATTEMPTS = 3  # for failures that obstore does not retry, such as a put that timed out
RETRY_CONFIG: "RetryConfig" = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
CLIENT_OPTIONS: "ClientConfig" = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=60),
    "allow_http": True,  # only used if the environment names an http endpoint, such as MinIO's
}
_memory_stores: dict[str, "ObjectStore"] = {}  # memory:// stores of this process, by URL


def open_remote_store(url: str) -> "RemoteObjectStore":
    """Open a store; credentials and endpoint come from the provider's environment variables.

    Raises InvalidArgument for a URL that obstore rejects.
    """
    if url.startswith("memory://"):
        memory_store = _memory_stores.setdefault(url.rstrip("/"), MemoryStore())
        return RemoteObjectStore(url, memory_store)
    try:
        store = from_url(url, retry_config=RETRY_CONFIG, client_options=CLIENT_OPTIONS)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise InvalidArgument(f"{url} cannot be opened as a store: {reason}") from error
    return RemoteObjectStore(url, store)


class RemoteObjectStore:
    """Any store that obstore supports, below the prefix in its URL."""

    def __init__(self, url: str, store: "ObjectStore"):
        self._url, self._store = url.rstrip("/"), store

    @property
    def url(self) -> str:
        return self._url

    def put(
        self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        mode: Any = "create" if if_absent else _split_etag(if_match) if if_match else "overwrite"
        with self._translated_errors(key, "written"):
            result = obstore.put(
                self._store, checked_key(key), content, mode=mode, use_multipart=False
            )
            return _join_etag(key, result)

    def put_chunks(self, key: str, iter_chunks: ChunkFactory) -> None:
        for attempts_left in reversed(range(_ATTEMPTS)):
            first_chunk, rest = _split_first_request(iter_chunks())
            content: Any = first_chunk if rest is None else itertools.chain((first_chunk,), rest)
            try:
                with self._translated_errors(key, "written"):
                    obstore.put(self._store, checked_key(key), content)
                return
            except StoreError:  # writing the same bytes again is harmless
                if not attempts_left:
                    raise

    def get(self, key: str, max_bytes: int = MAX_GET_BYTES) -> tuple[bytes, str]:
        for _ in range(_ATTEMPTS):
            with self._translated_errors(key, "read"):
                result = obstore.get(self._store, checked_key(key))
                if result.meta["size"] > max_bytes:
                    raise too_large_error(key, max_bytes)
                content = bytes(result.bytes())
            if len(content) == result.meta["size"]:
                return content, _join_etag(key, result.meta)
        raise self._short_read_error(key)

    def get_range(self, info: ObjectInfo, begin: int, end: int) -> memoryview:
        options: Any = {"range": (begin, end), "if_match": _split_etag(info.etag)["e_tag"]}
        for _ in range(_ATTEMPTS):
            with self._translated_errors(info.key, "read"):
                result = obstore.get(self._store, checked_key(info.key), options=options)
                content = memoryview(result.bytes())
            if len(content) == end - begin:
                return content
        raise self._short_read_error(info.key)

    def info(self, key: str) -> ObjectInfo:
        with self._translated_errors(key, "read"):
            return _object_info(obstore.head(self._store, checked_key(key)))

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._translated_errors(prefix, "listed"):
            for page in obstore.list(self._store, prefix=checked_prefix(prefix) or None):
                yield from (_object_info(meta) for meta in page if is_valid_key(str(meta["path"])))

    def sweep_unfinished(self, prefix: str) -> list[str]:
        return []

    def delete(self, key: str) -> None:
        with suppress(NoObject), self._translated_errors(key, "deleted"):
            obstore.delete(self._store, checked_key(key))

    def _short_read_error(self, key: str) -> StoreError:
        return StoreError(f"{key} in {self._url} cannot be read: the response ended early")

    @contextmanager
    def _translated_errors(self, key: str, verb: str) -> Iterator[None]:
        """Raise kvkeep's errors in place of obstore's."""
        try:
            yield
        except KvkeepError:
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Conflict(f"object {key} was changed, or already exists") from error
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            raise NoObject(f"there is no object {key} in {self._url}") from error
        except (exceptions.BaseError, OSError, NotImplementedError, ValueError) as error:
            reason = str(error).partition("\n")[0][:300]  # more lines quote obstore's source code
            raise StoreError(f"{key} in {self._url} cannot be {verb}: {reason}") from error


def _split_first_request(
    chunks: Iterable[bytes | memoryview],
) -> tuple[bytes, Iterator[bytes | memoryview] | None]:
    """Join the chunks that fill one request; return them, and the rest or None if all fit."""
    first_chunk, rest = bytearray(), iter(chunks)
    for chunk in rest:
        first_chunk += chunk
        if len(first_chunk) > _SINGLE_REQUEST_BYTES:
            return bytes(first_chunk), rest
    return bytes(first_chunk), None


def _object_info(meta: Any) -> ObjectInfo:
    key = str(meta["path"])
    return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp(), _join_etag(key, meta))


def _join_etag(key: str, result: Any) -> str:
    """Join an object's e_tag and version: Google's store checks conditions by the version."""
    e_tag, version = result["e_tag"], result["version"]
    if not e_tag:
        raise StoreError(f"the store returns no ETag for {key}, which kvkeep needs")
    return f"{e_tag}{_VERSION_SEPARATOR}{version}" if version else str(e_tag)


def _split_etag(etag: str) -> dict[str, str]:
    """Split an ETag of `_join_etag` as obstore expects it."""
    e_tag, _, version = etag.partition(_VERSION_SEPARATOR)
    return {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}
