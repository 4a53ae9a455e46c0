"""The compute lock and the compute thread: one thread of the process computes at a time.

A step uses all cores. Two at once would take them from each other and be slower than one after the
other, and sessions share memory (forks their cells, all of them the model) that only one thread at
a time may change. So the process has one compute lock. It is held for one prefill step, one decoded
token, one snapshot, or one edit or compression, all of its steps included; in between, other
threads have their turn.

Steps of all threads are computed by one thread, in the order in which they were requested. Each
thread that enters OpenMP has a team of threads of its own there. With a second team there are more
threads than cores, and OpenMP then lets all of them sleep between two products instead of waiting
for the next; a new thread also has its products prepared again. The team ends when no step was
requested for a while.

That thread is a thread of this module, or, while an engine runs, the engine's thread (`hosting`):
its own steps need no hand-over, and before each of them it runs the steps that other threads have
requested. If it is busy with something else, the module's thread runs them.

Work that may take long and that Ctrl-C can end is computed by the calling thread
(`computes_itself`). It holds the lock until its end. Steps that its progress callback requests,
such as those of `Engine.yield_turn`, run in the same thread under the same lock.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch

TEAM_PATIENCE = 0.05  # seconds without a step after which a thread's OpenMP team ends
_HOST_PATIENCE = 0.02  # seconds after which a step is offered to the module's thread, too
_HANDOVER = 0.0002  # seconds in which a thread that waits for the lock can take it
_SOFT = 1  # omp_pause_soft

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Job:
    """A call that another thread runs, on as many threads as the caller's torch would."""

    def __init__(self, call: Callable[[], Any]):
        self.call: Callable[[], Any] | None = call
        self.threads = torch.get_num_threads()
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self._claimed, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    @property
    def claimed(self) -> bool:
        return self._claimed.locked()

    def claim(self) -> bool:
        """Claim the call, to run it or to give it up; returns False if it was claimed before."""
        return self._claimed.acquire(blocking=False)

    def run(self) -> None:
        assert self.call is not None
        try:
            if self.threads != torch.get_num_threads():
                torch.set_num_threads(self.threads)
            self.result = self.call()
        except BaseException as error:
            self.error = error
        self.call, self.finished = None, True  # the caller's objects are not held any longer
        self._done.release()

    def wait(self, timeout: float = -1) -> None:
        """Wait for the end, at most `timeout` seconds; -1 for any time."""
        while not self.finished:
            if not self._done.acquire(timeout=timeout):
                return


class _Host:
    """The thread that computes the steps of all others while it hosts; see `hosting`."""

    def __init__(self, wake: Callable[[Callable[[], None]], object]):
        self.thread = threading.get_ident()
        self.wake = wake  # makes the host call a function soon
        self.jobs = SimpleQueue[_Job]()


class ComputeWorker:
    """Runs the calls of all threads under the compute lock, one after the other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Callers that compute themselves and wait for the lock. The host, which takes it again at
        # once after each step, would otherwise overtake them again and again.
        self.waiting = set[object]()
        self._jobs = SimpleQueue[_Job]()
        self._host: _Host | None = None
        self._start = threading.RLock()  # an interrupted call may leave it locked by its thread
        self._thread: threading.Thread | None = None

    @property
    def holds_lock(self) -> bool:
        """Whether the calling thread computes already."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    @property
    def is_host(self) -> bool:
        """Whether the calling thread is the host."""
        return self._host is not None and self._host.thread == threading.get_ident()

    def run_in_worker(self, call: Callable[[], _Result]) -> _Result:
        """Return what `call()` returns, or raise what it raises, in the thread that computes.

        Ctrl-C ends the wait for its turn. A call that has begun is waited for, whatever comes.
        """
        release_openmp_threads()  # other work of the calling thread may have left one
        self._require_started()
        job, host = _Job(call), self._host
        try:
            if host is not None:
                host.jobs.put(job)
                host.wake(self.run_waiting)
                job.wait(_HOST_PATIENCE)
            if not job.claimed:
                self._jobs.put(job)
            job.wait()
        except BaseException:  # of a signal's handler, in the main thread
            while not job.claim() and not job.finished:
                with suppress(BaseException):
                    job.wait()
            raise
        # The error's traceback holds this frame, and that of `run`, which holds the job. If either
        # still held the error, the call's objects would stay until garbage is collected.
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
            self.waiting.add(caller)
            with self.lock:
                self.waiting.discard(caller)
                try:
                    return call()
                finally:
                    release_openmp_threads()
        finally:
            self.waiting.discard(caller)

    def run_waiting(self) -> None:
        """Run the jobs that other threads have requested until now, if called in the host."""
        host, threads = self._host, torch.get_num_threads()
        if host is None or not self.is_host:
            return
        for _ in range(host.jobs.qsize()):  # not those that come meanwhile: it is the host's turn
            self._run_job(host.jobs.get_nowait())
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
        if self.waiting:
            time.sleep(_HANDOVER)

    @contextmanager
    def hosting(self, wake: Callable[[Callable[[], None]], object]) -> Iterator[None]:
        with self._start:
            becomes_host = self._host is None
            if becomes_host:
                self._host = _Host(wake)
        try:
            yield
        finally:
            if becomes_host:
                self._host = None  # callers that wait then offer their jobs to the module's thread
                release_openmp_threads()

    def _require_started(self) -> None:
        if self._thread is not None:
            return
        with self._start:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvkeep", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=TEAM_PATIENCE)
            except Empty:
                release_openmp_threads()
                job = self._jobs.get()
            self._run_job(job)
            del job  # or the last caller's session would be held until the next call

    def _run_job(self, job: _Job) -> None:
        # Claimed under the lock only: until then the host may run it, or its caller give up.
        with self.lock:
            if job.claim():
                job.run()


_worker = ComputeWorker()


def computing() -> AbstractContextManager[Any]:
    """Return the compute lock, a context manager; the thread that holds it may take it again.

    Ctrl-C ends the wait for it. What uses all cores is to be a function under `computes`.
    """
    return _worker.lock


def hosting(wake: Callable[[Callable[[], None]], object]) -> AbstractContextManager[None]:
    """Compute the steps of all threads in the calling thread, until the block ends.

    A second thread that would host at the same time hands its steps over to the first.

    wake: makes the calling thread call a function soon, if it is waiting for something to do.
    """
    return _worker.hosting(wake)


def computes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run the function under the compute lock, in the one thread that computes.

    For a step, and for what takes a moment: once it has begun, Ctrl-C waits for its end.
    """

    return _run_in_turn(function, ComputeWorker.run_in_worker)


def computes_itself(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run the function under the compute lock, in the calling thread.

    For what may take long: in the main thread Ctrl-C ends it after the current step.
    """

    return _run_in_turn(function, ComputeWorker.run_in_caller)


def _run_in_turn(
    function: Callable[_Arguments, _Result],
    run: Callable[[ComputeWorker, Callable[[], _Result]], _Result],
) -> Callable[_Arguments, _Result]:
    """Run the function under the compute lock: by `run`, or at once in a thread that computes."""

    @wraps(function)
    def run_in_turn(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        worker = _worker
        if worker.holds_lock:
            return function(*args, **kwargs)
        if worker.is_host:
            worker.run_waiting()
            with worker.lock:
                return function(*args, **kwargs)
        return run(worker, partial(function, *args, **kwargs))

    return run_in_turn


def release_openmp_threads() -> None:
    """End the OpenMP threads that wait for the calling thread, if there are any.

    Does nothing with LLVM's OpenMP, whose call would end the teams of all threads, or with a
    version of GNU's that has no such call.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], object] | None:
    process = ctypes.CDLL(None)
    if hasattr(process, "__kmpc_fork_call"):
        return None
    return getattr(process, "omp_pause_resource_all", None)


def reset() -> None:
    """Begin anew, as in a forked child: of the parent's threads only the calling one exists."""
    global _worker
    _worker = ComputeWorker()


if hasattr(os, "register_at_fork"):
    # A team's threads are not in the child, and OpenMP would wait for them there.
    os.register_at_fork(before=release_openmp_threads, after_in_child=reset)
