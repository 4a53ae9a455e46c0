"""The engine: generations, sessions and changes of sessions for many callers, in one thread."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.engine.admission import Admission
from kvkeep.engine.borrowed import BorrowedSessions
from kvkeep.engine.events import GenerationEvent
from kvkeep.engine.generation import Generation, GenerationRequest
from kvkeep.engine.operations import Operation, OperationLog, Totals
from kvkeep.engine.record import STEP, SessionRecord
from kvkeep.engine.registry import SessionRegistry, snapshot_session_name
from kvkeep.engine.reuse import CacheMiss, Match, WholeSteps, best_match
from kvkeep.engine.saving import SessionSaver
from kvkeep.engine.scheduler import Limits, SchedulingPolicy
from kvkeep.engine.session_files import SnapshotLabels
from kvkeep.engine.session_operations import SessionOperations
from kvkeep.engine.thread import EngineThread
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.objects.paths import Source
from kvkeep.storage.prefixes.interface import PrefixCache
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")


class Engine:
    """Serves many callers at once over one model.

        with Engine(load_model()) as engine:
            answers = [engine.generate(GenerationRequest(prompt, 100)) for prompt in prompts]
            print([answer.text() for answer in answers])

    All methods may be called from any thread; results that take time are
    `concurrent.futures.Future`s. One thread computes: one token of all generations that decode,
    then a prefill step of one prompt. The number of generations changes the speed of each, and no
    bit of its result.

    A prompt without a session reuses what it can of its owner's sessions and of a prefix store.
    `owner` separates tenants: a short name, such as the digest of a key.
    """

    def __init__(
        self,
        model: Model,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        folder: str | Path | None = None,
        stores: str | Path | Callable[[str], PrefixCache] | None = None,
        snapshots: Callable[[str], SnapshotLabels] | None = None,
    ):
        """settings: of sessions that are created for a prompt, as of `Model.session`; by default
        its defaults and a prefill step of 128. folder: where sessions are saved; None for memory
        alone. stores: a folder for each owner's prefix store, or a function that returns an
        owner's; None for none. snapshots: returns an owner's snapshots by label; None for those in
        the folder."""
        self.model = model
        self.settings = {"prefill_step": STEP, **(settings or {})}
        self.limits = limits or Limits()
        place = None if folder is None else validation.path("folder", folder)
        self._stores = stores if callable(stores) or stores is None else _stores_in(stores)
        self._new_session("0")  # invalid settings are refused here, not at the first request
        policy = SchedulingPolicy(self.limits)
        self._registry = SessionRegistry(model, place, policy, snapshots)
        self._log = OperationLog()
        self._operations = SessionOperations(model, self._registry, policy, self._log)
        self._admission = Admission(
            model, self._registry, policy, self._new_session, self._operations.log
        )
        self._scheduler = self._admission.scheduler
        self._deadline = 0.0
        idle = self.limits.save_idle_after / 2 + 0.05
        self._thread = EngineThread(self._step, idle, self._end)
        self._saver = SessionSaver(self._registry, self._thread.post)
        self.borrowed = BorrowedSessions(model, self._registry, self.call, self._discard)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def losses(self) -> list[str]:
        """Descriptions of what earlier sessions have lost, a line for each."""
        return self._registry.losses

    # Generations

    def generate(
        self, request: GenerationRequest, session: str | None = None, owner: str = "0"
    ) -> Generation:
        """Submit a request; return its generation once it is admitted. See `submit`."""
        return self.submit(request, session, owner).result()[0]

    def submit(
        self,
        request: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
        session: str | None = None,
        owner: str = "0",
        listener: Callable[[GenerationEvent], None] | None = None,
        revision: int | None = None,
    ) -> Future[list[Generation]]:
        """Start a generation, in a session or in one that is created for it.

        request: or, for a session, a function that returns it for the session as it is then.
        listener: see `Generation`. revision: that the session must be at.

        Raises InvalidArgument and ContextFull as `Session.feed`, NoRoom, NoSuchSession, Busy,
        WrongRevision.
        """
        if not callable(request) or session is None:
            validation.instance("request", request, GenerationRequest)
        admit = self._admission.admit
        return self.call(lambda: [admit(request, session, owner, listener, revision)])

    def submit_many(
        self,
        request: GenerationRequest,
        samplings: Sequence[Any],
        owner: str = "0",
        listeners: Sequence[Callable[[GenerationEvent], None] | None] | None = None,
    ) -> Future[list[Generation]]:
        """Start a generation for each sampling; the prompt is prefilled once for all of them."""
        listeners = listeners or [None] * len(samplings)
        admit = self._admission.admit_many
        return self.call(partial(admit, request, samplings, owner, listeners))

    # Sessions

    def create(
        self,
        owner: str = "0",
        name: str | None = None,
        session: Session | None = None,
        notes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Future[SessionRecord]:
        """Register a new session, or an existing one. settings: as of `Model.session`."""

        def create() -> SessionRecord:
            new = session or self._new_session(owner, **settings)
            return self._operations.create(new, owner, name, notes)

        return self.call(create)

    def sessions(self, owner: str = "0", unnamed: bool = False) -> Future[list[SessionRecord]]:
        """Return an owner's named sessions, the most recently used first. They are read-only.

        unnamed: include those that were created for a prompt, which are evicted first.
        """
        return self.call(
            lambda: [record for record in self._registry.of(owner) if record.named or unnamed]
        )

    def find(self, name: str, owner: str = "0") -> Future[SessionRecord]:
        """Return a session, in memory or not. It is read-only."""
        return self.call(lambda: self._registry.find(name, owner))

    def explain(self, prompt: Sequence[int], owner: str = "0") -> Future[Match]:
        """Return what of a prompt would be reused, and why not more. Changes nothing."""
        return self.call(
            lambda: best_match(prompt, self._registry.of(owner), self._new_session(owner))
        )

    def cache_misses(self, owner: str = "0") -> Future[list[CacheMiss]]:
        """Return the newest prompts that continued no session, the newest first."""
        return self.call(lambda: self._admission.cache_misses.of(owner))

    def operations(self, owner: str = "0") -> Future[list[Operation]]:
        """Return the newest operations, the newest first."""
        return self.call(lambda: self._log.of(owner))

    def totals(self) -> Future[Totals]:
        """Return what was done until now, and what is held."""
        return self.call(self._admission.totals)

    def shared_bytes(self, record: SessionRecord) -> int:
        """Return the bytes of its storage that other sessions use, too. In the engine's thread."""
        return self._registry.shared_bytes(record)

    def prepare(self, prompt: Sequence[int], name: str, owner: str = "0") -> Future[int]:
        """Make a named session hold the beginning of a prompt and nothing else; returns its tokens.

        It holds what any session of the owner has of the prompt, as far as a generation gives the
        same bits; a prompt that continues where the session ends keeps all of it. The session is
        created if there is none of that name.
        """
        return self.call(
            lambda: self._operations.prepare(prompt, name, owner, self._new_session(owner))
        )

    def discard(self, name: str, owner: str = "0") -> Future[None]:
        """Forget a session, and cancel its generation."""
        return self.call(lambda: self._discard(self._registry.find(name, owner)))

    def set_notes(self, name: str, owner: str, notes: dict[str, Any]) -> Future[None]:
        """Store JSON values with a session; they replace those of the same keys."""
        return self.call(partial(self._operations.set_notes, name, owner, notes))

    def pin(self, name: str, owner: str, pinned: bool, revision: int | None = None) -> Future[None]:
        """Set whether a session stays in memory, whatever others need."""
        return self.call(partial(self._operations.pin, name, owner, pinned, revision))

    def inspect(self, name: str, owner: str, function: Callable[[SessionRecord], T]) -> Future[T]:
        """Return a function's result for a session, which is loaded for it; it changes nothing."""
        return self.call(partial(self._operations.inspect, name, owner, function))

    def change(
        self,
        name: str,
        owner: str,
        what: str,
        function: Callable[[Session], T],
        revision: int | None = None,
        adds: int = 0,
    ) -> Future[T]:
        """Change a session by a function, during which nothing else changes it.

        what: names the operation in the log. adds: how many tokens at most. A function that takes
        long passes `engine.yield_turn` on as `progress`: generations continue at each of its steps.
        """
        change = self._operations.change
        return self.call(partial(change, name, owner, what, function, revision, adds))

    def fork(
        self,
        name: str,
        owner: str = "0",
        at: int | None = None,
        new: str | None = None,
        revision: int | None = None,
        notes: dict[str, Any] | None = None,
    ) -> Future[SessionRecord]:
        """Create a session that continues another one, or its first `at` tokens.

        notes: None for those of the other.
        """
        return self.call(partial(self._operations.fork, name, owner, at, new, revision, notes))

    def delete(self, name: str, owner: str = "0", revision: int | None = None) -> Future[None]:
        """Forget a session, on disk too. Raises Busy while it has a generation."""
        return self.call(partial(self._operations.delete, name, owner, revision))

    def save(self, name: str, owner: str = "0", revision: int | None = None) -> Future[int]:
        """Save a session; the result is the revision on disk. Raises StoreError."""

        def begin() -> Future[int]:
            record = self._registry.find(name, owner)
            record.require_revision(revision)
            return self._saver.save(record)

        return _flat(self.call(begin))

    def snapshot(
        self, name: str, label: str, owner: str = "0", revision: int | None = None
    ) -> Future[int]:
        """Write a snapshot of a session under a label of the owner's; the result is its bytes.

        Raises InvalidArgument if the engine has no folder, StoreError.
        """

        def begin() -> Future[int]:
            record = self._registry.find(name, owner)
            record.require_revision(revision)
            self._registry.reserve_idle(record)
            path = self.snapshots(owner).path(label)
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            return self._saver.write(self._registry.snapshot(record), path)

        return _flat(self.call(begin))

    def restore(
        self,
        snapshot: str | Snapshot,
        owner: str = "0",
        name: str | None = None,
        replace: bool = False,
    ) -> Future[SessionRecord]:
        """Create a session that continues where a snapshot was taken.

        snapshot: or its label, which is read in the engine's thread. replace: whether it replaces a
        session of that name, which stays as it is if the snapshot cannot be restored.
        """

        def restore() -> SessionRecord:
            loaded = snapshot
            if not isinstance(loaded, Snapshot):
                loaded = self.load_snapshot(loaded, owner)
            return self._operations.restore(loaded, owner, name, replace)

        return self.call(restore)

    def load_snapshot(self, label: str, owner: str = "0") -> Snapshot:
        """Read a snapshot in the caller's thread. Raises InvalidArgument if there is none,
        StoreError."""
        return Snapshot.load(self.snapshots(owner).existing(label))

    def snapshots(self, owner: str = "0") -> SnapshotLabels:
        """Return the owner's snapshots by label."""
        return self._registry.snapshots_of(owner)

    def snapshot_session_name(self, file: Source) -> str | None:
        """Return the name of the session that a snapshot was taken of. Raises StoreError."""
        return snapshot_session_name(file)

    # The thread

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread, between two steps."""
        return self._thread.call(function)

    def yield_turn(self, tokens: int = 0) -> None:
        """Let generations take a step in the middle of long work in the engine's thread.

        tokens: ignored, so that it can be passed as a `progress` callback.
        """
        self._scheduler.step()

    def watch(self, listener: Callable[[Operation], None]) -> Callable[[], None]:
        """Call a listener with each operation, in the engine's thread; returns how to remove it."""
        return self._log.watch(listener)

    def close(self, grace: float = 0.0) -> None:
        """Admit nothing more, let generations run for `grace` seconds, and save all changes."""
        if not self._thread.closing.is_set():
            self._deadline = time.monotonic() + grace
            self._thread.close()

    def _step(self) -> bool:
        """Returns whether there is more to do."""
        if self._thread.closing.is_set() and time.monotonic() >= self._deadline:
            self._scheduler.cancel_all()
        self._scheduler.step()
        self._saver.save_idle(self.limits.save_idle_after)
        return len(self._scheduler.running) > 0

    def _end(self) -> None:
        self._saver.save_all()
        self._registry.close()

    def _discard(self, record: SessionRecord) -> None:
        for generation in self._scheduler.running:
            if generation.record is record:
                generation.cancel()
        self._scheduler.end_cancelled()
        self._registry.remove(record)

    def _new_session(self, owner: str, **settings: Any) -> Session:
        settings = {**self.settings, **settings}
        session = self.model.session(**settings)
        # What a store has was evaluated over cells that were not quantised.
        if self._stores is None or session.bits != Bits():
            return session
        store = WholeSteps(self._stores(owner), session.prefill_step)
        return self.model.session(store=store, **settings)


def _stores_in(stores: str | Path) -> Callable[[str], PrefixCache]:
    folder = validation.path("stores", stores)
    return lambda owner: PrefixStore(folder / owner)


def _flat(outer: Future[Future[T]]) -> Future[T]:
    """Return a future of the result of the future that is the result of `outer`."""
    flat: Future[T] = Future()

    def finish(inner: Future[T]) -> None:
        error = inner.exception()
        flat.set_result(inner.result()) if error is None else flat.set_exception(error)

    def chain(outer: Future[Future[T]]) -> None:
        error = outer.exception()
        if error is not None:
            flat.set_exception(error)
        else:
            outer.result().add_done_callback(finish)

    outer.add_done_callback(chain)
    return flat
