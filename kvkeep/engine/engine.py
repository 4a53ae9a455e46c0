"""One thread that computes for many: answers, sessions, and changes of them, in turn."""

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
from kvkeep.engine.cache_misses import CacheMiss
from kvkeep.engine.events import GenerationEvent
from kvkeep.engine.generation import Generation, GenerationRequest
from kvkeep.engine.limits import Limits, Operation, Totals
from kvkeep.engine.operations import OperationLog
from kvkeep.engine.record import STEP, SessionRecord
from kvkeep.engine.registry import Labels, SessionRegistry
from kvkeep.engine.reuse import Match, best_match
from kvkeep.engine.saving import SessionSaver
from kvkeep.engine.session_operations import SessionOperations
from kvkeep.engine.thread import EngineThread
from kvkeep.engine.whole_steps import WholeSteps
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.objects.paths import Source
from kvkeep.storage.prefixes.interface import PrefixCache
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.snapshot import Snapshot

T = TypeVar("T")


class Engine:
    """Reads and writes for many at once, over one model.

        with Engine(load_model()) as engine:
            answers = [engine.generate(GenerationRequest(prompt, 100)) for prompt in prompts]
            print([answer.text() for answer in answers])

    All methods may be called from any thread; what is to be waited for comes as a
    `concurrent.futures.Future`. One thread computes: one token of all answers that write, then a
    step of one prompt. How many there are changes the speed of an answer, and no bit of it.

    A prompt without a session takes what it can from the owner's sessions and from a prefix store.
    Who may see what is said by `owner`: a short name, such as the digest of a key.
    """

    def __init__(
        self,
        model: Model,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        folder: str | Path | None = None,
        stores: str | Path | Callable[[str], PrefixCache] | None = None,
        snapshots: Callable[[str], Labels] | None = None,
    ):
        """settings: of sessions that are made for a prompt, as of `Model.session`, by default those
        of that and a prefill step of 128. folder: where sessions are kept; None for memory
        alone. stores: a folder for each owner's prefix store, or what gives an owner's; None for
        none. snapshots: gives an owner's, by label; None for those in the folder."""
        self.model = model
        self.settings = {"prefill_step": STEP, **(settings or {})}
        self.limits = limits or Limits()
        place = None if folder is None else validation.path("folder", folder)
        self._stores = stores if callable(stores) or stores is None else _stores_in(stores)
        self._new_session("0")  # refused here, not at the first request
        self._keeping = SessionRegistry(model, place, self.limits.memory, snapshots)
        self._operations = OperationLog()
        self._changes = SessionOperations(model, self._keeping, self.limits, self._operations)
        self._answers = Admission(
            model, self._keeping, self.limits, self._new_session, self._changes.done
        )
        self._schedule = self._answers.schedule
        self._deadline = 0.0
        idle = self.limits.save_idle_after / 2 + 0.05
        self._thread = EngineThread(self._turn, idle, self._end)
        self._saving = SessionSaver(self._keeping, self._thread.post)
        self.borrowed = BorrowedSessions(model, self._keeping, self.call, self._discard)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def losses(self) -> list[str]:
        """What of earlier sessions is not there: a line for each."""
        return self._keeping.losses

    # Answers

    def generate(
        self, ask: GenerationRequest, session: str | None = None, owner: str = "0"
    ) -> Generation:
        """As `ask`, once the engine has taken it on."""
        return self.submit(ask, session, owner).result()[0]

    def submit(
        self,
        ask: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
        session: str | None = None,
        owner: str = "0",
        listener: Callable[[GenerationEvent], None] | None = None,
        revision: int | None = None,
    ) -> Future[list[Generation]]:
        """An answer to be made, in a session, or in one that is made for it.

        ask: or, for a session, a function that says it of the session as it stands then. listener:
        see `Generation`. revision: that the session must be at.

        Raises InvalidArgument and ContextFull as `Session.feed`, NoRoom, NoSuchSession, Busy,
        WrongRevision.
        """
        if not callable(ask) or session is None:
            validation.instance("ask", ask, GenerationRequest)
        return self.call(lambda: [self._answers.take_on(ask, session, owner, listener, revision)])

    def submit_many(
        self,
        ask: GenerationRequest,
        samplings: Sequence[Any],
        owner: str = "0",
        listeners: Sequence[Callable[[GenerationEvent], None] | None] | None = None,
    ) -> Future[list[Generation]]:
        """As many answers to one prompt as there are samplings; it is read once for all of them."""
        told = listeners or [None] * len(samplings)
        return self.call(partial(self._answers.take_on_several, ask, samplings, owner, told))

    # Sessions

    def create(
        self,
        owner: str = "0",
        name: str | None = None,
        session: Session | None = None,
        notes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Future[SessionRecord]:
        """Keeps a new session, or one that was made elsewhere; settings: as of `Model.session`."""

        def made() -> SessionRecord:
            new = session or self._new_session(owner, **settings)
            return self._changes.create(new, owner, name, notes)

        return self.call(made)

    def sessions(self, owner: str = "0", unnamed: bool = False) -> Future[list[SessionRecord]]:
        """All that an owner has by name, the one used last first. To be looked at only.

        unnamed: with those that were made for a prompt, and make room for others.
        """
        return self.call(
            lambda: [kept for kept in self._keeping.of(owner) if kept.named or unnamed]
        )

    def find(self, name: str, owner: str = "0") -> Future[SessionRecord]:
        """A session as it is, in memory or not. To be looked at only."""
        return self.call(lambda: self._keeping.find(name, owner))

    def explain(self, prompt: Sequence[int], owner: str = "0") -> Future[Match]:
        """What of a prompt would be reused, and why not more. Changes nothing."""

        def explained() -> Match:
            fresh = SessionRecord("", owner, False, None, self._new_session(owner))
            return best_match(prompt, self._keeping.of(owner), fresh)

        return self.call(explained)

    def cache_misses(self, owner: str = "0") -> Future[list[CacheMiss]]:
        """The newest prompts that no session went on with, the last one first."""
        return self.call(lambda: self._answers.cache_misses.of(owner))

    def operations(self, owner: str = "0") -> Future[list[Operation]]:
        """What was done lately, the last one first."""
        return self.call(lambda: self._operations.of(owner))

    def totals(self) -> Future[Totals]:
        """What was done, and what is held, as of now."""
        return self.call(self._answers.totals)

    def shared_bytes(self, kept: SessionRecord) -> int:
        """Bytes of its storage that other sessions look at, too. In the engine's thread."""
        return self._keeping.shared_bytes(kept)

    def prepare(self, prompt: Sequence[int], name: str, owner: str = "0") -> Future[int]:
        """Makes a named session hold the beginning of a prompt, and nothing else; how much of it.

        What it or any other session of the owner's holds of the prompt is taken, as far as an
        answer will be the same to the bit; a prompt that goes on where it stands keeps all. There
        is a session of that name afterwards.
        """

        return self.call(
            lambda: self._changes.prepare(prompt, name, owner, self._new_session(owner))
        )

    def discard(self, name: str, owner: str = "0") -> Future[None]:
        """Forgets a session, whatever is at work in it."""
        return self.call(lambda: self._discard(self._keeping.find(name, owner)))

    def set_notes(self, name: str, owner: str, notes: dict[str, Any]) -> Future[None]:
        """Keeps JSON values beside a session, in the place of those of the same name."""
        return self.call(partial(self._changes.set_notes, name, owner, notes))

    def pin(self, name: str, owner: str, pinned: bool, revision: int | None = None) -> Future[None]:
        """Whether a session stays in memory, whatever others need."""
        return self.call(partial(self._changes.pin, name, owner, pinned, revision))

    def inspect(self, name: str, owner: str, function: Callable[[SessionRecord], T]) -> Future[T]:
        """What a function says of a session, brought back to memory for it; it changes nothing."""
        return self.call(partial(self._changes.inspect, name, owner, function))

    def change(
        self,
        name: str,
        owner: str,
        what: str,
        function: Callable[[Session], T],
        revision: int | None = None,
        adds: int = 0,
    ) -> Future[T]:
        """What a function does to a session, while nothing else does.

        what: for those who watch. adds: at most so many tokens. A function that takes long hands
        `engine.yield_turn` on as `progress`: others go on at each of its steps.
        """
        changed = partial(self._changes.change, name, owner, what, function, revision, adds)
        return self.call(changed)

    def fork(
        self,
        name: str,
        owner: str = "0",
        at: int | None = None,
        new: str | None = None,
        revision: int | None = None,
        notes: dict[str, Any] | None = None,
    ) -> Future[SessionRecord]:
        """A session that goes on where another stands, or stood after `at` tokens.

        notes: in the place of those of the other.
        """
        return self.call(partial(self._changes.fork, name, owner, at, new, revision, notes))

    def delete(self, name: str, owner: str = "0", revision: int | None = None) -> Future[None]:
        """Forgets a session, on disk too. What is at work in it is to be cancelled first."""
        return self.call(partial(self._changes.delete, name, owner, revision))

    def save(self, name: str, owner: str = "0", revision: int | None = None) -> Future[int]:
        """The revision that is on disk from then on. Raises StoreError."""

        def begun() -> Future[int]:
            kept = self._keeping.find(name, owner)
            kept.require_revision(revision)
            return self._saving.save(kept)

        return _flat(self.call(begun))

    def snapshot(
        self, name: str, label: str, owner: str = "0", revision: int | None = None
    ) -> Future[int]:
        """Writes what a session is now under a label of the owner's; the bytes that it takes.

        Raises InvalidArgument where the engine has no folder, StoreError.
        """

        def begun() -> Future[int]:
            kept = self._keeping.find(name, owner)
            kept.require_revision(revision)
            self._keeping.reserve_idle(kept)
            path = self.snapshots(owner).path(label)
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            return self._saving.write(self._keeping.snapshot(kept), path)

        return _flat(self.call(begun))

    def restore(
        self,
        label: str | Snapshot,
        owner: str = "0",
        name: str | None = None,
        replace: bool = False,
    ) -> Future[SessionRecord]:
        """A new session that goes on where the one stood that a snapshot was taken of.

        label: of the owner's, which is read in the engine's thread; or one that was read.

        replace: whether a session of that name, if there is one, becomes it. It stays as it is
        where the snapshot cannot be restored.
        """

        def restored() -> SessionRecord:
            snapshot = label if isinstance(label, Snapshot) else self.load_snapshot(label, owner)
            return self._changes.restore(snapshot, owner, name, replace)

        return self.call(restored)

    def load_snapshot(self, label: str, owner: str = "0") -> Snapshot:
        """What was written under a label, in the caller's thread. Raises InvalidArgument where
        there is none, StoreError."""
        return Snapshot.load(self.snapshots(owner).existing(label))

    def snapshots(self, owner: str = "0") -> Labels:
        """The owner's snapshots, by label."""
        return self._keeping.snapshots_of(owner)

    def snapshot_session_name(self, file: Source) -> str | None:
        """The name of the session that a snapshot was taken of. Raises StoreError."""
        return self._keeping.snapshot_session_name(file)

    # The thread

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What a function gives that is run in the engine's thread, between two turns."""
        return self._thread.call(function)

    def yield_turn(self, tokens: int = 0) -> None:
        """For work that takes long: others have their turn."""
        self._schedule.turn()

    def watch(self, listener: Callable[[Operation], None]) -> Callable[[], None]:
        """Tells of each operation, in the engine's thread; what is returned ends that."""
        return self._operations.watch(listener)

    def close(self, grace: float = 0.0) -> None:
        """Takes on nothing more, lets answers go on for `grace` seconds, and saves what is not."""
        if not self._thread.closing.is_set():
            self._deadline = time.monotonic() + grace
            self._thread.close()

    def _turn(self) -> bool:
        if self._thread.closing.is_set() and time.monotonic() >= self._deadline:
            self._schedule.cancel_all()
        begun = time.perf_counter()
        self._schedule.turn()
        self._answers.turned(time.perf_counter() - begun)
        self._saving.save_idle(self.limits.save_idle_after)
        return len(self._schedule) > 0

    def _end(self) -> None:
        self._saving.save_all()
        self._keeping.close()

    # How

    def _discard(self, kept: SessionRecord) -> None:
        for answer in self._schedule.answers:
            if answer.kept is kept:
                answer.cancel()
        self._schedule.end_cancelled()
        self._keeping.remove(kept)

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
    """What a future gives that a future gives."""
    flat: Future[T] = Future()

    def given(inner: Future[T]) -> None:
        error = inner.exception()
        flat.set_result(inner.result()) if error is None else flat.set_exception(error)

    def begun(first: Future[Future[T]]) -> None:
        error = first.exception()
        if error is not None:
            flat.set_exception(error)
        else:
            first.result().add_done_callback(given)

    outer.add_done_callback(begun)
    return flat
