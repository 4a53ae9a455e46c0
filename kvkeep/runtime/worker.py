"""The compute lock and the compute thread: one thread of the process computes at a time.

A step uses all cores, and sessions share memory, such as the model and the cells of forks, that
only one thread at a time may change. So the process has one compute lock. It is held for one
prefill step, one decoded token, one snapshot, or one whole edit or compression.

One thread computes the steps of all threads, in the order of requests, because each thread that
enters OpenMP gets its own team of OpenMP threads there. With a second team there are more threads
than cores, and OpenMP lets threads sleep between two products instead of spinning. The team is
released when no step was requested for a while.

The compute thread is a thread of this module, or, while an engine runs, the engine's thread
(`hosting`): it needs no hand-over for its own steps, and runs those of other threads before each of
them. While it is busy with something else, the module's thread runs them.

Long work that Ctrl-C can end is computed by the calling thread (`computes_in_caller`), which holds
the lock until its end. Steps that its progress callback requests, such as those of
`Engine.yield_turn`, run in the same thread under the same lock.

When the process ends, the main thread takes the lock and keeps it: no daemon thread computes then.
"""

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch

from kvkeep.runtime.cpu import require_full_teams

OPENMP_TIMEOUT_SECONDS = 0.05  # without a step, after which a thread releases its OpenMP team
_HOST_TIMEOUT_SECONDS = 0.02  # after which a step is offered to the module's thread, too
_EXIT_SECONDS = 5.0  # in which a step that runs when the process ends can be completed
_HANDOVER_SECONDS = 0.0002  # in which a thread that waits for the lock can take it
_OMP_PAUSE_SOFT = 1

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Job:
    """A call that another thread runs, on as many threads as the caller's torch would."""

    def __init__(self, call: Callable[[], Any]):
        self.call: Callable[[], Any] | None = call
        self.num_threads = torch.get_num_threads()
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self._claim_lock, self._done_lock = threading.Lock(), threading.Lock()
        self._done_lock.acquire()

    @property
    def claimed(self) -> bool:
        return self._claim_lock.locked()

    def claim(self) -> bool:
        """Claim the call, to run or to cancel it; returns False if it was claimed before."""
        return self._claim_lock.acquire(blocking=False)

    def run(self) -> None:
        """Run the claimed call, and wake the thread that waits for it."""
        assert self.call is not None
        try:
            if self.num_threads != torch.get_num_threads():
                torch.set_num_threads(self.num_threads)
            require_full_teams()
            self.result = self.call()
        except BaseException as error:
            self.error = error
        self.call, self.finished = None, True  # the call holds the caller's objects
        self._done_lock.release()

    def wait(self, timeout: float = -1) -> None:
        """Wait until the call is finished, at most `timeout` seconds; -1 for no limit."""
        while not self.finished:
            if not self._done_lock.acquire(timeout=timeout):
                return


@dataclass(frozen=True, eq=False)
class _Host:
    """The thread that computes the steps of all others while it hosts; see `hosting`."""

    call_soon: Callable[[Callable[[], None]], object]
    thread_id: int = field(default_factory=threading.get_ident)
    jobs: SimpleQueue[_Job] = field(default_factory=SimpleQueue)


class ComputeWorker:
    """Runs the calls of all threads under the compute lock, one after the other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Callers in `run_in_caller` that wait for the lock. The host takes it again right after
        # each step, and would overtake them again and again.
        self.waiting_callers = set[object]()
        self._jobs = SimpleQueue[_Job]()
        self.host: _Host | None = None
        self.is_ending = False  # the process is, and has taken the lock: see `_stop_computing`
        self.start_lock = threading.RLock()  # an interrupted call may leave it locked
        self._thread: threading.Thread | None = None

    @property
    def holds_lock(self) -> bool:
        """Whether the calling thread holds the compute lock."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    @property
    def in_host_thread(self) -> bool:
        """Whether the calling thread is the one that hosts; see `hosting`."""
        return self.host is not None and self.host.thread_id == threading.get_ident()

    def run_in_worker(self, call: Callable[[], _Result]) -> _Result:
        """Return `call()`, called in the compute thread.

        Ctrl-C ends the wait for the call's turn, but not a call that has begun.
        """
        release_openmp_threads()  # other work of the calling thread may have left one
        self._require_started()
        job, host = _Job(call), self.host
        try:
            if host is not None:
                host.jobs.put(job)
                host.call_soon(self.run_waiting_jobs)
                job.wait(_HOST_TIMEOUT_SECONDS)
            if not job.claimed:
                self._jobs.put(job)
            job.wait()
        except BaseException:  # of a signal's handler, in the main thread
            while not job.claim() and not job.finished:
                with suppress(BaseException):
                    job.wait()
            raise
        # The error's traceback holds this frame and that of `run`. The variables here must not hold
        # the error in turn: such a cycle keeps the call's objects until garbage is collected.
        error, job.error = job.error, None
        try:
            if error is not None:
                raise error
            result: _Result = job.result
            return result
        finally:
            del job, error

    def run_in_caller(self, call: Callable[[], _Result]) -> _Result:
        """Return `call()`, called in this thread while it holds the compute lock."""
        caller = object()
        try:
            self.waiting_callers.add(caller)
            with self.lock:
                self.waiting_callers.discard(caller)
                require_full_teams()
                try:
                    return call()
                finally:
                    release_openmp_threads()
        finally:
            self.waiting_callers.discard(caller)

    def run_waiting_jobs(self) -> None:
        """Run the jobs that other threads have requested so far, if called in the host."""
        host, num_threads = self.host, torch.get_num_threads()
        if host is None or not self.in_host_thread:
            return
        for _ in range(host.jobs.qsize()):  # later ones wait: it is the host's turn
            self._run_job(host.jobs.get_nowait())
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
        if self.waiting_callers:
            time.sleep(_HANDOVER_SECONDS)

    def _require_started(self) -> None:
        if self._thread is not None:
            return
        with self.start_lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run_forever, name="kvkeep", daemon=True)
                thread.start()
                self._thread = thread

    def _run_forever(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=OPENMP_TIMEOUT_SECONDS)
            except Empty:
                release_openmp_threads()
                job = self._jobs.get()
            with self.lock:
                self._run_job(job)
                del job  # or the last caller's session would be held until the next call

    def _run_job(self, job: _Job) -> None:
        # Claimed only under the lock: until then the host may run it, or its caller cancel it.
        with self.lock:
            if job.claim():
                job.run()


_worker = ComputeWorker()


@atexit.register
def _stop_computing() -> None:
    """Take the compute lock for good, so that no daemon thread computes while the process ends.

    Before CPython 3.14 such a thread is ended inside of torch, which aborts the process.
    """
    _worker.is_ending = _worker.lock.acquire(timeout=_EXIT_SECONDS)


@contextmanager
def others_may_compute() -> Iterator[None]:
    """Release the compute lock for the block if the process ends and this thread has taken it."""
    worker = _worker
    if not (worker.is_ending and worker.holds_lock):
        yield
        return
    worker.lock.release()
    try:
        yield
    finally:
        worker.lock.acquire(timeout=_EXIT_SECONDS)


def compute_lock() -> AbstractContextManager[Any]:
    """Return the compute lock, a reentrant context manager.

    Ctrl-C ends the wait for it. For work that uses all cores, use `computes_in_worker` instead.
    """
    return _worker.lock


@contextmanager
def hosting(call_soon: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Compute the steps of all threads in the calling thread, until the block ends.

    If another thread hosts already, the calling thread hands its own steps over to that one.

    call_soon: makes the calling thread call a function soon, even if it is idle.
    """
    worker = _worker
    with worker.start_lock:
        becomes_host = worker.host is None
        if becomes_host:
            worker.host = _Host(call_soon)
    try:
        yield
    finally:
        if becomes_host:
            worker.host = None  # callers that wait then offer their jobs to the module's thread
            release_openmp_threads()


def computes_in_worker(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run the function in the compute thread, under the compute lock.

    For steps and short work: once it has begun, Ctrl-C waits for its end.
    """
    return _run_in_turn(function, ComputeWorker.run_in_worker)


def computes_in_caller(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run the function in the calling thread, under the compute lock.

    For long work: in the main thread Ctrl-C ends it after the current step.
    """
    return _run_in_turn(function, ComputeWorker.run_in_caller)


def _run_in_turn(
    function: Callable[_Arguments, _Result],
    run: Callable[[ComputeWorker, Callable[[], _Result]], _Result],
) -> Callable[_Arguments, _Result]:
    """Run the function by `run`, or directly in the thread that has the lock or is the host."""

    @wraps(function)
    def run_in_turn(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        worker = _worker  # a forked child has another one
        if worker.holds_lock:
            return function(*args, **kwargs)
        if worker.in_host_thread:
            worker.run_waiting_jobs()
            with worker.lock:
                require_full_teams()
                return function(*args, **kwargs)
        return run(worker, partial(function, *args, **kwargs))

    return run_in_turn


def release_openmp_threads() -> None:
    """End the OpenMP threads that wait for the calling thread, if there are any.

    Does nothing with LLVM's OpenMP, whose call would end the teams of all threads, or with a
    version of GNU's that has no such call.
    """
    if (pause := _omp_pause()) is not None:
        pause(_OMP_PAUSE_SOFT)


@cache
def _omp_pause() -> Callable[[int], object] | None:
    loaded_libraries = ctypes.CDLL(None)
    if hasattr(loaded_libraries, "__kmpc_fork_call"):
        return None
    return getattr(loaded_libraries, "omp_pause_resource_all", None)


def replace_worker() -> None:
    """Replace the worker, whose thread does not exist in a forked child."""
    global _worker
    _worker = ComputeWorker()


if hasattr(os, "register_at_fork"):
    # A team's threads are not in the child, and OpenMP would wait for them there.
    os.register_at_fork(before=release_openmp_threads, after_in_child=replace_worker)
