"""How a session has a single writer at a time: what is read and written, in which order.

Everything here is computed from what the store has said, and asks for nothing itself: each function
is a generator of steps, and is sent what became of them. `driver.py` takes the steps at a store;
the tests take them in every order, with every fault. docs/fleet.md says why it holds.
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
from kvkeep.storage.sessions.head import SessionHead, epoch_of, new_nonce, snapshot_name

T = TypeVar("T")
TRIES = 5  # of a put whose outcome is not known
LONGEST = 1000.0  # seconds of a lease; what is to last longer was said by a clock that is wrong
RELEASED = 0.0  # `expires` of a head that nobody holds
GONE = "gone"  # the tag of a version that was in the store for a moment: no object has it


@dataclass(frozen=True)
class VersionedHead:
    """A head that is or was in the store, and the tag that it had there."""

    head: SessionHead
    etag: str


@dataclass(frozen=True)
class ReadHead:
    """Is sent a `VersionedHead`, or None where there is no head."""


@dataclass(frozen=True)
class PutHead:
    """Is sent the new ETag. etag: of the head that it replaces; None: only where there is none."""

    head: SessionHead
    etag: str | None


@dataclass(frozen=True)
class Upload:
    """Writes what is to be committed, under a name that nobody else has."""

    snapshot: str


@dataclass(frozen=True)
class ListSnapshots:
    """Is sent the names of all that are there."""


@dataclass(frozen=True)
class Delete:
    snapshot: str


@dataclass(frozen=True)
class Wait:
    """Some time, longer at each try, so that what is overburdened is not asked at once again."""

    tries: int


StoreOperation = ReadHead | PutHead | Upload | ListSnapshots | Delete | Wait
Operations = Generator[StoreOperation, Any, T]


@dataclass(frozen=True)
class LeaseRequest:
    """A writer. name: as others are told. now: by its clock, seconds since 1970. lease: seconds for
    which it takes a session, until it takes it for longer."""

    name: str
    now: float
    lease: float

    @property
    def until(self) -> float:
        return self.now + self.lease


def create(who: LeaseRequest) -> Operations[VersionedHead]:
    """Begins a session and holds it. Raises InvalidArgument where there is one, HeldElsewhere where
    another has begun it and not committed yet."""
    now: VersionedHead | None = yield from _read()
    if now is None:
        head = SessionHead(1, 0, new_nonce(), who.name, who.until)
    elif (
        now.head.removed or not now.head.snapshot
    ):  # or begun by one who was killed before a commit
        if not now.head.removed:
            _require_free(now.head, who)
        epoch = now.head.epoch + 1
        head = now.head.next(epoch=epoch, removed=False, writer=who.name, expires=who.until)
    else:
        raise InvalidArgument("there is a session of that name already")
    try:
        return (yield from _replace(now, head))
    except Moved:
        raise InvalidArgument("somebody else has begun a session of that name") from None


def _require_free(head: SessionHead, who: LeaseRequest) -> None:
    """Raises HeldElsewhere where another writer may be at work."""
    if head.writer and who.now < head.expires < who.now + LONGEST:
        raise HeldElsewhere(f"{head.writer} is writing it", head.writer, head.expires)


def acquire(who: LeaseRequest, known: VersionedHead | None = None) -> Operations[VersionedHead]:
    """Takes a session that is there: from then on nobody who held it before can commit.

    known: the version that it is thought to be at, so that it need not be read.

    Raises NoObject where there is none, HeldElsewhere.
    """
    while True:
        now: VersionedHead | None = known or (yield from _read())
        if now is None or now.head.removed:
            raise NoObject("there is no such session")
        held = now.head
        _require_free(held, who)
        head = held.next(epoch=held.epoch + 1, writer=who.name, expires=who.until)
        try:
            return (yield from _replace(now, head))
        except Moved:  # by one who was faster, and may have let go since
            known = None


def renew(held: VersionedHead, who: LeaseRequest) -> Operations[VersionedHead]:
    """Holds a session for longer. Raises Moved where another has taken it."""
    return (yield from _replace(held, held.head.next(expires=who.until)))


def release(held: VersionedHead) -> Operations[VersionedHead]:
    """Lets others take a session at once. Raises Moved where one has."""
    return (yield from _replace(held, held.head.next(writer="", expires=RELEASED)))


def upload(held: VersionedHead) -> Operations[str]:
    """Brings what is to be committed to the store; its name. Renewals may go on meanwhile."""
    name = snapshot_name(held.head)
    yield Upload(name)
    return name


def commit(
    held: VersionedHead, snapshot: str, expires: float, writer: str
) -> Operations[VersionedHead]:
    """What was uploaded becomes the session, and what it was before goes.

    expires, writer: of the new head; RELEASED and "" release the lease in the same operation.
    Raises Moved where another writer has taken the session; the upload never was the session then.
    """
    before = held.head
    head = before.committed(snapshot, expires=expires, writer=writer)
    after = yield from _replace(held, head)
    yield from _delete([before.snapshot] if before.snapshot else [])
    return after


def remove(held: VersionedHead) -> Operations[None]:
    """There is no such session then."""
    names = yield ListSnapshots()
    yield from _replace(
        held, held.head.next(snapshot="", removed=True, writer="", expires=RELEASED)
    )
    # Those of this epoch too: nobody else has it, and whoever begins anew has a greater one.
    yield from _delete([name for name in names if (epoch_of(name) or 0) <= held.head.epoch])


def collect(held: VersionedHead) -> Operations[list[str]]:
    """Removes what writers left that were killed; the names.

    Only who holds the session can know: what is named by an epoch before this one can be committed
    by nobody any more, for the head has another tag than that writer knows. So it takes no clock,
    and no grace.
    """
    names = yield ListSnapshots()
    left = [
        name
        for name in names
        if (epoch := epoch_of(name)) is not None
        and epoch < held.head.epoch
        and name != held.head.snapshot
    ]
    yield from _delete(left)
    return left


def _replace(before: VersionedHead | None, head: SessionHead) -> Operations[VersionedHead]:
    """Puts a head in the place of another; whether that was done is known when this ends.

    An answer that was lost is made up for by reading: the nonce tells whether what is there is
    ours. Raises Moved where it is somebody else's, StoreError where the store could not be asked:
    then the put may have been done, or may be yet.
    """
    failure: StoreError | None = None
    for tries in range(TRIES):
        if tries:
            yield Wait(tries)
        try:
            tag = yield PutHead(head, before.etag if before else None)
            return VersionedHead(head, tag)
        except Conflict:
            pass  # perhaps of an earlier try of ours, whose answer was lost
        except StoreError as error:
            failure = error
        try:
            now: VersionedHead | None = yield ReadHead()
        except StoreError as error:
            failure = error
            continue
        if now is not None and now.head.nonce == head.nonce:
            return now
        if now is None and before is not None:
            raise Moved("the session's head is gone from the store")
        if now is None or (before is not None and now.etag == before.etag):
            continue
        if _is_committed(before, head, now):
            return VersionedHead(head, GONE)
        if before is None or not _is_ours(before.head, head, now.head):
            raise Moved(_where(now.head))
        before = now  # by an earlier put of ours, of which we did not know
    raise failure or StoreError("the store refuses a change and shows no reason")


def _is_ours(before: SessionHead, wanted: SessionHead, now: SessionHead) -> bool:
    """Whether a head is one that we have renewed, who hold the session and put another."""
    renewed = (now.epoch, now.gen, now.writer) == (before.epoch, before.gen, before.writer)
    return renewed and wanted.epoch == before.epoch  # who takes a session does not hold it yet


def _is_committed(before: VersionedHead | None, head: SessionHead, now: VersionedHead) -> bool:
    """Whether that head was there for a moment, and others have taken the session since."""
    commits = before is not None and head.snapshot not in ("", before.head.snapshot)
    return commits and now.head.has_committed(head.snapshot)


def _read() -> Operations[VersionedHead | None]:
    for tries in range(TRIES):
        try:
            found: VersionedHead | None = yield ReadHead()
            return found
        except (CorruptFile, NewerFormat):  # it would be read again as it is
            raise
        except StoreError:
            if tries == TRIES - 1:
                raise
        yield Wait(tries + 1)
    raise AssertionError


def _delete(names: list[str]) -> Operations[None]:
    for name in names:
        try:
            yield Delete(name)
        except StoreError:  # a collector will find it
            return


def _where(head: SessionHead) -> str:
    if head.removed:
        return "it was removed meanwhile"
    whom = f"{head.writer} has" if head.writer else "another writer, who let go of it since, had"
    return f"{whom} taken it (epoch {head.epoch}, generation {head.gen})"
