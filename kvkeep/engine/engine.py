"""The engine: generations, sessions and changes of sessions for many callers, in one thread."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.chat.written import WrittenAnswers
from kvkeep.engine.admission import Admission
from kvkeep.engine.borrowed import BorrowedSessions
from kvkeep.engine.engine_files import EngineFiles, call_each
from kvkeep.engine.generation import Generation
from kvkeep.engine.lookups import PrefixLookups
from kvkeep.engine.memory_bound import max_memory_bytes
from kvkeep.engine.operations import Operation, OperationLog, Totals
from kvkeep.engine.pins import PrefixPin
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.request import GenerationRequest, Listener, RequestLike, SessionRequest
from kvkeep.engine.reuse import ReuseReport, StepAlignedCache
from kvkeep.engine.scheduler import Limits, SchedulingPolicy
from kvkeep.engine.session_disk import SessionDisk
from kvkeep.engine.session_files import LabelledSnapshots
from kvkeep.engine.session_operations import SessionOperations
from kvkeep.engine.steps import DEFAULT_PREFILL_STEP, StepGrid
from kvkeep.engine.thread import EngineThread, flatten_future
from kvkeep.errors import Cancelled, InvalidArgument
from kvkeep.model import Model
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.drafts import SpeculationOptions
from kvkeep.session.embedding import embed, embedding_memory
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.prefixes.store import stores_of_owners
from kvkeep.storage.snapshots.codec import Codec
from kvkeep.storage.snapshots.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")


def _engine_method(
    operation: Callable[Concatenate[SessionOperations, P], T],
) -> Callable[Concatenate["Engine", P], Future[T]]:
    """Return a method of `Engine` that runs a session operation in the engine's thread."""

    @wraps(operation)
    def method(self: "Engine", /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.call(operation, self._operations, *args, **kwargs)

    return method


class Engine(AbstractContextManager["Engine"]):
    """Serves many callers at once over one model.

        with Engine(load_model()) as engine:
            answers = [engine.generate(GenerationRequest(prompt, 100)) for prompt in prompts]
            print([answer.text() for answer in answers])

    All methods may be called from any thread; results that take time are
    `concurrent.futures.Future`s. Other generations slow a generation down, but change no bit of
    its result. A prompt without a session reuses prefixes from its owner's sessions and prefix
    store. `owner` separates tenants: a short name, such as the digest of a key; "0" for only one.
    """

    def __init__(
        self,
        model: Model,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        folder: str | Path | None = None,
        stores: str | Path | Callable[[str], PrefixCache] | None = None,
        snapshots: Callable[[str], LabelledSnapshots] | None = None,
        alignment: AlignmentOptions | None = None,
        speculation: SpeculationOptions | None = None,
        codec: Codec = "exact",
    ):
        """settings: of `Model.session`, for new sessions; the prefill step is 128 by default.
        folder: where sessions are saved; None to keep them in memory only. stores: a folder for
        prefix stores, or a function that returns an owner's store, whose lookups run in threads;
        None for no stores. snapshots: returns an owner's labelled snapshots; None for those in
        `folder`. alignment: of requests that do not choose one; exact by default. speculation:
        likewise; off by default. codec: of saved sessions, and of prefix stores in a folder."""
        self.model = model
        self.settings = {"prefill_step": DEFAULT_PREFILL_STEP, **(settings or {})}
        self.limits = limits or Limits()
        session_folder = None if folder is None else validation.path("folder", folder)
        self._stores = (
            stores if callable(stores) or stores is None else stores_of_owners(stores, codec)
        )
        default_session = self._new_session("0")  # invalid settings are refused here
        self.default_policy = default_session.policy  # of new sessions
        self.default_max_kv_size = default_session.max_kv_size
        policy = SchedulingPolicy(self.limits)
        checkpoint_bytes = self.settings.get("checkpoint_bytes")
        default_session.snapshot().require_codec(codec)
        calibration = self.settings.get("calibration")
        files = (session_folder, snapshots, checkpoint_bytes, codec, calibration)
        self._disk = SessionDisk(model, *files)
        self._registry = SessionRegistry(self._disk, policy)
        self.losses = self._disk.losses  # messages about unsaved changes
        self._operation_log = OperationLog()
        # Between looks for unsaved sessions and pins.
        idle_interval = min(1.0, self.limits.save_idle_after / 2 + 0.05)
        self._thread = EngineThread(
            self._step, idle_interval, self._end, lambda: not self._scheduler.running
        )
        self._lookups = PrefixLookups(partial(self._thread.post, lambda: None))
        keeps_answers = stores is not None  # prompts are kept on disk then, too
        post = self._thread.post
        self._files = EngineFiles(self._registry, session_folder, keeps_answers, post)
        self.alignment = alignment or AlignmentOptions()
        parts = (self._registry, self._operation_log, self._new_session, self.alignment)
        self._operations = SessionOperations(*parts)
        self._admission = Admission(*parts, speculation or SpeculationOptions(), self._lookups)
        self._scheduler = self._admission.scheduler
        self.borrowed = BorrowedSessions(self._registry, self._scheduler.cancel)
        self._thread.start()

    def __exit__(self, *failure: object) -> None:
        self.close()

    # Generations

    def generate(
        self, request: RequestLike, session: str | None = None, owner: str = "0"
    ) -> Generation:
        """Submit a request as `submit` does, and wait until it is admitted."""
        return self.submit(request, session, owner).result()[0]

    def submit(
        self,
        request: RequestLike,
        session: str | None = None,
        owner: str = "0",
        listener: Listener | None = None,
        revision: int | None = None,
    ) -> Future[list[Generation]]:
        """Start a generation in a named session, or in one that is created for it.

        request: for a named session also one that depends on it. session: its name. listener: see
        `Generation`. revision: that the session must have. Raises as `Session.feed`, and NoRoom,
        NoSuchSession, Busy, WrongRevision.
        """
        if not isinstance(request, SessionRequest) or session is None:
            validation.instance("request", request, GenerationRequest)
        return self.call(self._admission.admit, request, session, owner, [listener], revision)

    def submit_many(
        self,
        request: GenerationRequest,
        samplings: Sequence[Sampling],
        owner: str = "0",
        listeners: Sequence[Listener | None] | None = None,
    ) -> Future[list[Generation]]:
        """Start a generation for each of several `Sampling`s; the prompt is prefilled once.

        listeners: one for each generation, or none. Raises as `submit`.
        """
        validation.instance("request", request, GenerationRequest)
        samplings = [validation.instance("a sampling", item, Sampling) for item in samplings]
        listeners = listeners or [None] * len(samplings)
        if not samplings or len(listeners) != len(samplings):
            raise InvalidArgument(
                "expected one sampling or more, and as many listeners; found "
                f"{len(samplings)} and {len(listeners)}"
            )
        return self.call(self._admission.admit, request, None, owner, listeners, None, samplings)

    def embed(self, ids: Sequence[int]) -> Future[Tensor]:
        """Return the vector of a text; see `kvkeep.session.embedding.embed`.

        Generations continue between its prefill steps, and cancelling the future ends it at the
        next one. Its memory counts as a session's does. Raises UnsupportedModel for a model without
        pooling, and NoRoom.
        """
        model, step = self.model, self.settings["prefill_step"]

        def embed_in_memory_limit() -> Tensor:
            memory = embedding_memory(model, len(ids))
            with self._registry.reserving(max_memory_bytes(memory, step, len(ids))):
                return embed(model, ids, model.pooling, step, self.yield_turn)

        return self._thread.submit_long(embed_in_memory_limit)

    # Sessions: each method returns a future of what the operation returns

    create = _engine_method(SessionOperations.create)
    sessions = _engine_method(SessionOperations.sessions)
    find = _engine_method(SessionOperations.find)
    use = _engine_method(SessionOperations.use)
    explain = _engine_method(SessionOperations.explain)
    pins = _engine_method(SessionOperations.pins)
    release_pin = _engine_method(SessionOperations.release_pin)
    prepare = _engine_method(SessionOperations.prepare)
    continue_compacted = _engine_method(SessionOperations.continue_compacted)
    set_notes = _engine_method(SessionOperations.set_notes)
    set_resident = _engine_method(SessionOperations.set_resident)
    set_title = _engine_method(SessionOperations.set_title)
    inspect = _engine_method(SessionOperations.inspect)
    fork = _engine_method(SessionOperations.fork)
    revert = _engine_method(SessionOperations.revert)
    restore = _engine_method(SessionOperations.restore)
    delete = _engine_method(SessionOperations.delete)
    change = _engine_method(SessionOperations.change)

    def pin(
        self, name: str, owner: str, pinned: bool, revision: int | None = None
    ) -> Future[SessionRecord]:
        """Deprecated: use `set_resident`."""
        message = "Engine.pin is deprecated: use Engine.set_resident"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.set_resident(name, owner, pinned, revision)

    def change_in_steps(
        self,
        name: str,
        owner: str,
        kind: str,
        function: Callable[[Session], T],
        revision: int | None = None,
        new_tokens: int = 0,
        notes: Mapping[str, Any] = MappingProxyType({}),
    ) -> Future[T]:
        """Change a session by a function that evaluates in steps, yielding to requests in between.

        The function calls `yield_turn` between its steps: requests that do not change the session
        are answered meanwhile, and those that do get Busy. Cancelling the future ends the change at
        its next step; it is not made. Otherwise as `change`.
        """
        change, submit = self._operations.change, self._thread.submit_long
        return submit(change, name, owner, kind, function, revision, new_tokens, notes)

    def run(self, function: Callable[[SessionOperations], T]) -> Future[T]:
        """Run a function of the session operations in the engine's thread, and return its result.

        What it does and reads, such as a change and the session's fields after it, is one
        operation: nothing happens in between.
        """
        return self.call(function, self._operations)

    def run_in_steps(self, function: Callable[[SessionOperations], T]) -> Future[T]:
        """Run a long function as `run` does; `yield_turn` serves other requests meanwhile.

        The function passes `yield_turn` as the `progress` argument of operations that take long.
        Cancelling the future ends it at its next step.
        """
        return self._thread.submit_long(function, self._operations)

    def all_pins(self) -> Future[list[PrefixPin]]:
        """Return the pins of all owners."""
        return self.call(lambda: list(self._registry.pins))

    def save(self, name: str, owner: str = "0", revision: int | None = None) -> Future[int]:
        """Save a session; the result is the revision on disk. Raises StoreError."""
        find, save = self._registry.find, self.begin_save
        return flatten_future(self.call(lambda: save(find(name, owner, revision))))

    def begin_save(self, record: SessionRecord) -> Future[int]:
        """Begin to save a session, as `save`. Call it in the engine's thread."""
        return self._files.saver.save(record)

    def snapshot(
        self, name: str, label: str, owner: str = "0", revision: int | None = None
    ) -> Future[int]:
        """Write a labelled snapshot; the result is its size in bytes. Raises as `snapshots`."""
        load, write = self._registry.load_existing, self._files.saver.snapshot
        return flatten_future(self.call(lambda: write(load(name, owner, revision), label)))

    def discard(self, name: str, owner: str = "0") -> Future[None]:
        """Remove a session, and cancel its generation."""
        return self.call(lambda: self.borrowed.discard(self._registry.find(name, owner)))

    def stop(
        self,
        name: str,
        owner: str,
        function: Callable[[SessionRecord], T],
        revision: int | None = None,
    ) -> Future[T]:
        """End a session's generation, if there is one; the result is `function(record)`.

        Its tokens so far stay in the session, and its caller gets Cancelled. revision: of the
        session before the generation. Raises NoSuchSession, WrongRevision.
        """

        def stop_generation() -> T:
            record = self._registry.find(name, owner, revision)
            self._scheduler.cancel(record)
            return function(record)

        return self.call(stop_generation)

    def remove_name(self, name: str, owner: str = "0") -> Future[None]:
        """Cancel a session's generation and make it unnamed; its cells serve the next prompts."""
        return self.call(lambda: self._remove_name(self._registry.find(name, owner)))

    def shared_bytes(self, record: SessionRecord) -> int:
        """Return the bytes that it shares with other sessions. Call it in the engine's thread."""
        return self._registry.shared_bytes(record)

    @property
    def written(self) -> WrittenAnswers:
        """The tokens of generated answers.

        With a folder and prefix stores all are kept over a restart, and otherwise those in the text
        of a saved session.
        """
        return self._disk.written

    # Snapshots, in the caller's thread

    def snapshots(self, owner: str = "0") -> LabelledSnapshots:
        """Return the owner's snapshots by label. Raises InvalidArgument if there is no folder."""
        return self._disk.snapshots_of(owner)

    @property
    def shares_snapshots(self) -> bool:
        """Whether labelled snapshots are in a store of several servers, and sessions here only."""
        return self._disk.shares_snapshots

    def load_snapshot(self, label: str, owner: str = "0") -> Snapshot:
        """Read a snapshot. Raises NoSuchSnapshot, StoreError."""
        return Snapshot.load(self.snapshots(owner).existing_path(label))

    # Statistics

    def cache_misses(self, owner: str = "0") -> Future[list[ReuseReport]]:
        """Return the recent prompts that continued no session, the newest first."""
        return self.call(lambda: list(self._admission.cache_misses[owner]))

    def operations(self, owner: str = "0") -> Future[list[Operation]]:
        """Return the recent operations, the newest first."""
        return self.call(lambda: list(self._operation_log.recent[owner]))

    def totals(self) -> Future[Totals]:
        """Return counts of the work since the start, and of the present work."""
        return self.call(self._admission.totals)

    def watch(self, listener: Callable[[Operation], None]) -> Callable[[], None]:
        """Call a listener in the engine's thread with each operation; return its remover."""
        return self._operation_log.watch(listener)

    # Memory

    def room_bytes(self) -> Future[int]:
        """Return the bytes that are free, or held by sessions that can be evicted."""
        return self.call(self._registry.room_bytes)

    def watch_releases(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call a listener in the engine's thread whenever a refused request may have room.

        Returns a function that removes it.
        """
        return self._registry.releases.watch(listener)

    # The thread

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in the engine's thread, between two steps."""
        return self._thread.submit(function, *args, **kwargs)

    def yield_turn(self, tokens: int = 0) -> None:
        """Run the waiting calls and one scheduler step: the `progress` callback of long work.

        tokens: not used. Raises Cancelled once the engine is to end, or if the future of the work
        was cancelled, so that the work is given up.
        """
        with torch.inference_mode(mode=False):  # as between two calls, whatever the work is
            self._thread.take_turn()
        if self._thread.past_deadline:
            raise Cancelled("the engine is shut down: the change was not made")
        if self._thread.is_unwanted:
            raise Cancelled("the request was cancelled: the change was not made")

    def close(self, grace: float = 0.0) -> None:
        """Admit nothing more, let generations run for `grace` seconds, and save all changes.

        A second call, such as after an interrupt of the first one, can only shorten the grace.
        """
        self._thread.close(grace)

    def _step(self) -> bool:
        """Run a scheduler step; returns whether another one can follow at once."""
        if self._thread.past_deadline:
            self._scheduler.cancel_all()
        self._scheduler.step()
        self._files.save_changed()
        return self._scheduler.can_step

    def _end(self) -> None:
        """End what still runs, save all changes, and unlock all files, however much of it fails."""
        scheduler = self._scheduler
        ends = [self._lookups.close, scheduler.cancel_all, scheduler.end_cancelled]
        call_each([*ends, self._files.close])

    def _remove_name(self, record: SessionRecord) -> None:
        self._scheduler.cancel(record)
        if not record.removed:  # with the generation, as one without a name and still empty
            self._registry.remove_name(record)

    def _new_session(self, owner: str, **settings: Any) -> Session:
        """Create an empty session with the owner's prefix store. settings: replace the engine's."""
        settings = {**self.settings, **settings}
        session = self.model.session(**settings)
        if self._stores is None:
            return session
        store = StepAlignedCache(self._stores(owner), StepGrid.of(session))
        return self.model.session(store=store, **settings)
