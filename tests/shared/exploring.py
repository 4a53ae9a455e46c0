"""A model checker of the lease protocol: explores all schedules of some actors, with all faults.

An actor is a generator of store operations. Its next operation depends only on the results that it
was sent. So a state consists of the store's content, the operations that are delayed on their way,
and the results that each actor was sent. A state is explored once, but all schedules through it are
counted.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.errors import Conflict, StoreError
from kvkeep.storage.sessions import head as heads
from kvkeep.storage.sessions.head import SessionHead
from kvkeep.storage.sessions.protocol import (
    DeleteSnapshot,
    HeadVersion,
    ListSnapshots,
    PutHead,
    ReadHead,
    StoreOperation,
    Wait,
)


@dataclass(frozen=True)
class Upload:
    """A writer's operation: write the content to commit."""

    snapshot: str


@dataclass(frozen=True)
class Fetch:
    """A reader's operation. Result: whether the snapshot exists."""

    snapshot: str


Actor = Callable[[list[Any]], Generator[Any, Any, None]]
_UNKNOWN, _CONFLICT, _NONE = "unknown", "conflict", "none"


@dataclass(frozen=True)
class World:
    """A state.

    commits: snapshots in the order of their commits. late: delayed operations, which may be applied
    at any time or never. sent: the results sent to each actor, in order. dead: killed actors.
    """

    head: SessionHead | None
    snapshots: frozenset[str]
    commits: tuple[str, ...]
    late: frozenset[Any]
    sent: tuple[tuple[Any, ...], ...]
    dead: frozenset[int]
    faults: int


class Violation(AssertionError):
    """A broken invariant of the lease protocol."""


class Explorer:
    """An exhaustive search through all schedules.

    actors: get a list to which they append the snapshots whose commits were confirmed to them.
    faults: the maximum per schedule.
    """

    def __init__(self, actors: list[Actor], head: SessionHead | None, faults: int):
        self._actors = actors
        snapshots = frozenset([head.snapshot] if head and head.snapshot else [])
        no_results: tuple[tuple[Any, ...], ...] = ((),) * len(actors)
        self._first = World(head, snapshots, (), frozenset(), no_results, frozenset(), faults)
        self._known: dict[World, int] = {}
        self._replayed: dict[tuple[int, tuple[Any, ...]], tuple[Any, tuple[str, ...]]] = {}

    def explore(self) -> tuple[int, int]:
        """Return the number of schedules and of states. Raises Violation."""
        return self._schedules(self._first), len(self._known)

    def _schedules(self, world: World) -> int:
        """Return the number of schedules from a state on."""
        count = self._known.get(world)
        if count is None:
            self._check(world)
            count = sum(self._schedules(after) for after in self._next(world)) or 1
            self._known[world] = count
        return count

    def _next(self, world: World) -> Iterator[World]:
        """Yield the states after one operation of an actor or one delayed operation."""
        for index in range(len(self._actors)):
            if index not in world.dead:
                step, _ = self._replay(index, world.sent[index])
                if step is not None:
                    yield from self._after_step(world, index, step)
        for step in world.late:
            rest = replace(world, late=world.late - {step})
            yield self._apply(rest, step)[0]

    def _after_step(self, world: World, index: int, step: Any) -> Iterator[World]:
        """Yield the states after an actor's operation, without a fault and with each one."""
        after, result = self._apply(world, step)
        yield self._with_result(after, index, result)
        if isinstance(step, Wait) or not world.faults:
            return
        faulty = replace(world, faults=world.faults - 1)
        dead = world.dead | {index}
        yield replace(faulty, dead=dead)  # killed before the step
        yield self._with_result(faulty, index, _UNKNOWN)  # the request never arrived
        if isinstance(step, (PutHead, Upload, DeleteSnapshot)):
            arrived = replace(self._apply(world, step)[0], faults=world.faults - 1)
            yield self._with_result(arrived, index, _UNKNOWN)  # it arrived; its response was lost
            later = replace(faulty, late=world.late | {step})
            yield self._with_result(later, index, _UNKNOWN)  # it may arrive later
            yield replace(later, dead=dead)

    def _with_result(self, world: World, index: int, result: Any) -> World:
        """Return the state in which an actor was sent one more result."""
        sent = list(world.sent)
        sent[index] = (*sent[index], result)
        return replace(world, sent=tuple(sent))

    def _apply(self, world: World, step: Any) -> tuple[World, Any]:
        """Return the state after an operation of the store, and the operation's result."""
        match step:
            case ReadHead():
                return world, world.head or _NONE
            case PutHead(head, tag):
                if (world.head.nonce if world.head else None) != tag:
                    return world, _CONFLICT
                commits = world.commits
                if head.snapshot and (world.head is None or head.snapshot != world.head.snapshot):
                    commits = (*commits, head.snapshot)
                self._check_put(world.head, head)
                return replace(world, head=head, commits=commits), head.nonce
            case Upload(snapshot):
                return replace(world, snapshots=world.snapshots | {snapshot}), None
            case DeleteSnapshot(snapshot):
                return replace(world, snapshots=world.snapshots - {snapshot}), None
            case ListSnapshots():
                return world, tuple(sorted(world.snapshots))
            case Fetch(snapshot):
                return world, snapshot in world.snapshots
            case Wait():
                return world, None
        raise AssertionError(step)

    def _check_put(self, before: SessionHead | None, after: SessionHead) -> None:
        if before is None:
            return
        if after.epoch < before.epoch:
            raise Violation(f"an epoch decreased: {before} {after}")
        committed = after.snapshot not in ("", before.snapshot)
        if after.gen != before.gen + committed:
            raise Violation(f"a generation was repeated or skipped: {before} {after}")
        if committed and heads.epoch_of(after.snapshot) != before.epoch:
            raise Violation(f"a writer committed without the lease: {before} {after}")

    def _check(self, world: World) -> None:
        if world.head and world.head.snapshot and world.head.snapshot not in world.snapshots:
            raise Violation(f"the snapshot that the head names is missing: {world}")
        if len(set(world.commits)) < len(world.commits):
            raise Violation(f"a commit was repeated: {world.commits}")
        for index in range(len(self._actors)):
            _, confirmed = self._replay(index, world.sent[index])
            if not set(confirmed) <= set(world.commits):
                raise Violation(f"a confirmed commit is lost: {world}")

    def _replay(
        self, index: int, sent: tuple[Any, ...]
    ) -> tuple[StoreOperation | None, tuple[str, ...]]:
        """Return an actor's next operation, None at its end, and its confirmed commits."""
        replayed = self._replayed.get((index, sent))
        if replayed is None:
            with _NumberedNonces(f"{index}"):
                replayed = _replay_actor(self._actors[index], sent)
            self._replayed[index, sent] = replayed
        return replayed


def _replay_actor(actor: Actor, sent: tuple[Any, ...]) -> tuple[Any, tuple[str, ...]]:
    confirmed: list[str] = []
    steps = actor(confirmed)
    try:
        step = next(steps)
        for result in sent:
            step = _send(steps, result)
    except StopIteration:
        step = None
    return step, tuple(confirmed)


def _send(steps: Generator[Any, Any, None], result: Any) -> Any:
    if result == _UNKNOWN:
        return steps.throw(StoreError("no answer"))
    if result == _CONFLICT:
        return steps.throw(Conflict("another"))
    if isinstance(result, SessionHead):
        return steps.send(HeadVersion(result, result.nonce))
    return steps.send(None if result == _NONE else result)


class _NumberedNonces:
    """Numbered nonces in place of random ones, so that replaying an actor is deterministic."""

    def __init__(self, actor: str):
        self._actor, self._count = actor, 0

    def token_hex(self, nbytes: int) -> str:
        self._count += 1
        return f"{self._actor}.{self._count}"

    def __enter__(self) -> None:
        self._before, heads.secrets = heads.secrets, self

    def __exit__(self, *failure: object) -> None:
        heads.secrets = self._before
