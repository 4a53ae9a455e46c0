"""The driver of the lease protocol: runs its operations against an object store."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvkeep.errors import NoObject, StoreError
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.interface import ChunkFactory
from kvkeep.storage.sessions import protocol
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.interface import SNAPSHOT_SUFFIX
from kvkeep.storage.sessions.protocol import HeadVersion, Operations, StoreOperation

T = TypeVar("T")
HEAD_FILE = "head.json"
FIRST_WAIT, MAX_WAIT = 0.02, 1.0  # seconds between attempts


class SessionObjects:
    """The objects of one session in a store: its head and its snapshots.

    prefix: of their keys, with '/' at the end. name: of the session.
    """

    def __init__(self, store: ObjectStore, prefix: str, name: str):
        self.store, self.name = store, name
        self._head_key, self._snapshots_prefix = f"{prefix}{HEAD_FILE}", f"{prefix}snapshots/"

    def key(self, snapshot: str) -> str:
        """Return the key of a snapshot, by its name."""
        return f"{self._snapshots_prefix}{snapshot}{SNAPSHOT_SUFFIX}"

    def head(self) -> HeadVersion | None:
        """Read the current head; None if there is none. Raises StoreError."""
        try:
            content, etag = self.store.get(self._head_key)
        except NoObject:
            return None
        return HeadVersion(SessionHead.from_json(content, self.name), etag)

    def upload(self, snapshot: str, iter_chunks: ChunkFactory) -> None:
        self.store.put_chunks(self.key(snapshot), iter_chunks)

    def run(self, operations: Operations[T]) -> T:
        """Run a protocol function's operations, and return its result. Raises its errors."""
        resume: Callable[[], StoreOperation] = partial(next, operations)
        while True:
            try:
                operation = resume()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                resume = partial(operations.send, self._execute(operation))
            except StoreError as error:
                resume = partial(operations.throw, error)

    def _execute(self, operation: StoreOperation) -> Any:
        """Run one operation, and return its result as `protocol` specifies it."""
        match operation:
            case protocol.ReadHead():
                return self.head()
            case protocol.PutHead(head, etag):
                content, is_new = head.to_json(), etag is None
                return self.store.put(self._head_key, content, if_absent=is_new, if_match=etag)
            case protocol.ListSnapshots():
                infos = self.store.list_objects(self._snapshots_prefix)
                keys = (info.key.removeprefix(self._snapshots_prefix) for info in infos)
                return [key.removesuffix(SNAPSHOT_SUFFIX) for key in keys]
            case protocol.DeleteSnapshot(snapshot):
                self.store.delete(self.key(snapshot))
            case protocol.Wait(attempt):
                # Exponentially longer, with jitter, so that competing writers spread out.
                time.sleep(min(MAX_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0))
        return None
