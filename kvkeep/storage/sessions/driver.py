"""The steps of the protocol, taken at a store of objects."""

import random
import time
from typing import Any, TypeVar

from kvkeep.errors import NoObject, StoreError
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.interface import ChunkSource
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.protocol import (
    Delete,
    ListSnapshots,
    Operations,
    PutHead,
    ReadHead,
    StoreOperation,
    Upload,
    VersionedHead,
    Wait,
)

T = TypeVar("T")
SNAPSHOT_SUFFIX = ".kvkeep"
HEAD = "head.json"
_FIRST, _MOST = 0.02, 1.0  # seconds of a wait


class SessionObjects:
    """Where one session is in a store: its head, and beside it what was committed.

    name: as people know it. folder: its prefix, with '/' at the end.
    """

    def __init__(self, objects: ObjectStore, folder: str, name: str):
        self.objects, self.name = objects, name
        self._head, self._snapshots = f"{folder}{HEAD}", f"{folder}snapshots/"

    def key(self, snapshot: str) -> str:
        return f"{self._snapshots}{snapshot}{SNAPSHOT_SUFFIX}"

    def head(self) -> VersionedHead | None:
        """As it is now."""
        try:
            content, tag = self.objects.get(self._head)
        except NoObject:
            return None
        return VersionedHead(SessionHead.read(content, self.name), tag)

    def run(self, steps: Operations[T], pieces: ChunkSource | None = None) -> T:
        """What the steps come to. pieces: of what they upload. Raises what they raise."""
        result: Any = None
        error: StoreError | None = None
        while True:
            try:
                step = steps.throw(error) if error is not None else steps.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            result, error = None, None
            try:
                result = self._take(step, pieces)
            except StoreError as failure:
                error = failure

    def _take(self, step: StoreOperation, pieces: ChunkSource | None) -> Any:
        match step:
            case ReadHead():
                return self.head()
            case PutHead(head, tag):
                absent = tag is None
                content = head.content()
                return self.objects.put(self._head, content, if_absent=absent, if_match=tag)
            case Upload(snapshot):
                assert pieces is not None
                self.objects.put_chunks(self.key(snapshot), pieces)
            case ListSnapshots():
                return [
                    self._name(stored.key) for stored in self.objects.list_objects(self._snapshots)
                ]
            case Delete(snapshot):
                self.objects.delete(self.key(snapshot))
            case Wait(tries):
                _wait(tries)
        return None

    def _name(self, key: str) -> str:
        return key.removeprefix(self._snapshots).removesuffix(SNAPSHOT_SUFFIX)


def _wait(tries: int) -> None:
    """Twice as long each time, and by chance, so that those who failed together do not again."""
    time.sleep(min(_MOST, _FIRST * 2**tries) * random.uniform(0.5, 1.0))
