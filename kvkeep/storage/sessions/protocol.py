"""The lease protocol: which objects a writer reads and writes, in which order.

It guarantees that a session has a single writer at a time; docs/fleet.md explains why. Each
function is a generator that yields store operations and receives their results or errors. It does
no I/O: `driver.py` runs the operations, and tests run them in every order with every fault.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from kvkeep.errors import (
    Conflict,
    CorruptFile,
    HeldElsewhere,
    InvalidArgument,
    Moved,
    NewerFormat,
    NoObject,
    StoreError,
)
from kvkeep.storage.sessions.head import SessionHead, epoch_of, new_nonce

T = TypeVar("T")
MAX_ATTEMPTS = 5  # for a request that fails
MAX_LEASE_SECONDS = 1000.0  # a lease that ends later was written by a wrong clock, and is ignored
RELEASED = 0.0  # `expires` of a head without a lease holder
SUPERSEDED = "superseded"  # the ETag of a version that another one has replaced: matches no object


@dataclass(frozen=True)
class HeadVersion:
    """A version of the head that is or was in the store, with the ETag that it had there."""

    head: SessionHead
    etag: str


# The operations that a protocol function yields


@dataclass(frozen=True)
class ReadHead:
    """Read the head. Result: a `HeadVersion`, or None if there is none."""


@dataclass(frozen=True)
class PutHead:
    """Compare-and-swap the head. Result: the new ETag. Throws Conflict."""

    head: SessionHead
    etag: str | None  # of the head to replace; None if there must be no head


@dataclass(frozen=True)
class ListSnapshots:
    """List the session's snapshots. Result: their names."""


@dataclass(frozen=True)
class DeleteSnapshot:
    """Delete a snapshot."""

    snapshot: str


@dataclass(frozen=True)
class Wait:
    """Wait before an attempt, the longer the greater its number."""

    attempt: int


StoreOperation = ReadHead | PutHead | ListSnapshots | DeleteSnapshot | Wait
Operations = Generator[StoreOperation, Any, T]  # T: the result of the protocol function

# The protocol


@dataclass(frozen=True)
class LeaseRequest:
    """A writer's request for a lease."""

    writer: str  # its name
    now: float  # the time by its clock, in seconds since 1970
    seconds: float  # the duration of the lease unless it is renewed

    @property
    def expires(self) -> float:
        return self.now + self.seconds


def create(request: LeaseRequest) -> Operations[HeadVersion]:
    """Create a session, and acquire it.

    Raises InvalidArgument if it exists, HeldElsewhere if another writer has created it without a
    commit yet.
    """
    current: HeadVersion | None = yield from _read_head()
    if current is None:
        head = SessionHead(1, 0, new_nonce(), request.writer, request.expires)
    elif current.head.removed or not current.head.snapshot:
        _require_free(current.head, request)  # its creator may not have committed yet
        epoch = current.head.epoch + 1
        head = current.head.updated(
            epoch=epoch, removed=False, writer=request.writer, expires=request.expires
        )
    else:
        raise InvalidArgument("a session with this name already exists")
    try:
        return (yield from _replace_head(current, head))
    except Moved:
        raise InvalidArgument("another writer has just created a session with this name") from None


def _require_free(head: SessionHead, request: LeaseRequest) -> None:
    """Raise HeldElsewhere if a writer's lease has not expired."""
    if head.writer and request.now < head.expires < request.now + MAX_LEASE_SECONDS:
        raise HeldElsewhere(f"{head.writer} holds the lease", head.writer, head.expires)


def acquire(request: LeaseRequest, cached: HeadVersion | None = None) -> Operations[HeadVersion]:
    """Acquire a session: from then on, no earlier holder can commit.

    cached: the version that is probably current, which saves reading it. Raises NoObject if there
    is no session, HeldElsewhere.
    """
    while True:
        current: HeadVersion | None = cached or (yield from _read_head())
        if current is None or current.head.removed:
            raise NoObject("there is no such session")
        _require_free(current.head, request)
        epoch = current.head.epoch + 1
        head = current.head.updated(epoch=epoch, writer=request.writer, expires=request.expires)
        try:
            return (yield from _replace_head(current, head))
        except Moved:  # another writer was faster, and may have released it since
            cached = None


def renew(version: HeadVersion, request: LeaseRequest) -> Operations[HeadVersion]:
    """Extend the lease. Raises Moved if another writer has acquired the session."""
    return (yield from _replace_head(version, version.head.updated(expires=request.expires)))


def release(version: HeadVersion) -> Operations[HeadVersion]:
    """End the lease. Raises Moved if another writer has acquired the session."""
    return (yield from _replace_head(version, version.head.updated(writer="", expires=RELEASED)))


def commit(
    version: HeadVersion, snapshot: str, expires: float, writer: str
) -> Operations[HeadVersion]:
    """Make an uploaded snapshot the session's content, and delete the previous snapshot.

    snapshot: uploaded by the caller, under the `new_snapshot_name` of a version of this lease.
    expires, writer: of the new head; RELEASED and "" release the lease in the same operation.
    Raises Moved if another writer has acquired the session; then nothing was committed.
    """
    previous = version.head.snapshot
    head = version.head.after_commit(snapshot, expires=expires, writer=writer)
    committed = yield from _replace_head(version, head)
    yield from _delete_snapshots([previous] if previous else [])
    return committed


def remove(version: HeadVersion, request: str = "") -> Operations[None]:
    """Remove the session and its snapshots. Its head stays, marked as removed.

    request: the digest by which a repeated request is recognised, `removed_by` of the head.
    """
    names = yield ListSnapshots()
    removed_head = version.head.updated(
        snapshot="", removed=True, removed_by=request, writer="", expires=RELEASED
    )
    yield from _replace_head(version, removed_head)
    yield from _delete_snapshots(_removed_snapshots(names, removed_head))


def collect_garbage(version: HeadVersion) -> Operations[list[str]]:
    """Garbage-collect snapshots that killed writers left; return the names of the deleted ones.

    version: of a held lease, or the last one of a removed session, which needs no lease.

    An uncommitted snapshot of an earlier epoch can never be committed, as its writer's
    compare-and-swap fails: the head has another ETag. So there is no need to wait.
    """
    names, head = (yield ListSnapshots()), version.head
    if head.removed:
        return (yield from _delete_snapshots(_removed_snapshots(names, head)))
    epochs = {name: epoch_of(name) for name in names if name != head.snapshot}
    garbage = [n for n, epoch in epochs.items() if epoch is not None and epoch < head.epoch]
    return (yield from _delete_snapshots(garbage))


def _removed_snapshots(names: list[str], head: SessionHead) -> list[str]:
    """Return the snapshots of a removed session.

    Those of its last epoch are among them: only its remover had it, and the next creator gets a
    greater one.
    """
    return [name for name in names if (epoch_of(name) or 0) <= head.epoch]


def _replace_head(previous: HeadVersion | None, head: SessionHead) -> Operations[HeadVersion]:
    """Compare-and-swap the head from `previous` to `head`. previous: None if there must be none.

    If a response was lost, the nonce of the current head shows whether the put was applied. Raises
    Moved if another writer has replaced the head, StoreError if the store stays unreachable: then
    the put may have been applied, or may still be.
    """
    failure: StoreError | None = None
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            yield Wait(attempt)
        try:
            etag = yield PutHead(head, previous.etag if previous else None)
            return HeadVersion(head, etag)
        except Conflict:
            pass  # an earlier attempt, whose response was lost, may have been applied
        except StoreError as error:
            failure = error
        try:
            current: HeadVersion | None = yield ReadHead()
        except StoreError as error:
            failure = error
            continue
        if current is not None and current.head.nonce == head.nonce:
            return current
        if current is None and previous is not None:
            raise Moved("the session's head was removed from the store")
        if current is None or (previous is not None and current.etag == previous.etag):
            continue  # the put was not applied
        if _was_committed(previous, head, current):
            return HeadVersion(head, SUPERSEDED)
        if previous is None or not _is_own_renewal(previous.head, head, current.head):
            raise Moved(_describe_holder(current.head))
        previous = current  # written by an earlier renewal of ours whose response was lost
    raise failure or StoreError("the store rejected the change without a reason")


def _is_own_renewal(previous: SessionHead, head: SessionHead, current: SessionHead) -> bool:
    """Whether the current head renews the previous one for the same holder.

    A writer that is acquiring the session (`head` has another epoch) does not hold it yet.
    """
    fields = ("epoch", "gen", "writer")
    is_renewal = all(getattr(current, f) == getattr(previous, f) for f in fields)
    return is_renewal and head.epoch == previous.epoch


def _was_committed(previous: HeadVersion | None, head: SessionHead, current: HeadVersion) -> bool:
    """Whether `head` is a commit that was applied before other writers continued from it."""
    is_commit = previous is not None and head.snapshot not in ("", previous.head.snapshot)
    return is_commit and current.head.has_committed(head.snapshot)


def _read_head() -> Operations[HeadVersion | None]:
    """Read the head; try again if the store fails."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            version: HeadVersion | None = yield ReadHead()
            return version
        except (CorruptFile, NewerFormat):  # another attempt would read the same
            raise
        except StoreError:
            if attempt == MAX_ATTEMPTS - 1:
                raise
        yield Wait(attempt + 1)
    raise AssertionError  # not reached: the last attempt returns or raises


def _delete_snapshots(names: list[str]) -> Operations[list[str]]:
    """Delete snapshots until one fails; return the names of the deleted ones."""
    for index, name in enumerate(names):
        try:
            yield DeleteSnapshot(name)
        except StoreError:  # a later garbage collection deletes the others
            return names[:index]
    return names


def _describe_holder(head: SessionHead) -> str:
    """Say who replaced a head, for the message of Moved."""
    if head.removed:
        return "it was removed"
    holder = f"{head.writer} has" if head.writer else "another writer has"
    return f"{holder} acquired it (epoch {head.epoch}, generation {head.gen})"
