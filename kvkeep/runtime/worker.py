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
        self.over = False
        self._claimed, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    @property
    def claimed(self) -> bool:
        return self._claimed.locked()

    def claim(self) -> bool:
        """Whether no thread has claimed it before: one that runs it, or a caller that gave up."""
        return self._claimed.acquire(blocking=False)

    def run(self) -> None:
        assert self.call is not None
        try:
            if self.threads != torch.get_num_threads():
                torch.set_num_threads(self.threads)
            self.result = self.call()
        except BaseException as error:
            self.error = error
        self.call, self.over = None, True  # the caller's objects are not held any longer
        self._done.release()

    def wait(self, timeout: float = -1) -> None:
        """Wait for the end, at most `timeout` seconds; -1 for any time."""
        while not self.over:
            if not self._done.acquire(timeout=timeout):
                return


class _Host:
    """A thread of the caller's that computes. wake: makes it call a function soon."""

    def __init__(self, wake: Callable[[Callable[[], None]], object]):
        self.thread = threading.get_ident()
        self.wake = wake
        self.jobs = SimpleQueue[_Job]()


class ComputeWorker:
    """Runs calls under the compute lock, one after the other, in one thread for all others."""

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

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what `call()` returns, or raise what it raises, in the thread that computes.

        Ctrl-C ends the wait for its turn. A call that has begun is waited for, whatever comes.
        """
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
            while not job.claim() and not job.over:
                with suppress(BaseException):
                    job.wait()
            raise
        # The error's traceback holds this frame, and that of `run`, which holds the job. If either
        # still held the error, the call's objects would stay until garbage is collected.
        error, job.error = job.error, None
        try:
            if error is not None:
                raise error
            return job.result
        finally:
            del job, error

    def run_waiting(self) -> None:
        """In the host: run the jobs that other threads have requested until now."""
        host, threads = self._host, torch.get_num_threads()
        if host is None or host.thread != threading.get_ident():
            return
        for _ in range(host.jobs.qsize()):  # not those that come meanwhile: it is the host's turn
            self._run_job(host.jobs.get_nowait())
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
        if self.waiting:
            time.sleep(_HANDOVER)

    @contextmanager
    def hosting(self, wake: Callable[[Callable[[], None]], object]) -> Iterator[None]:
        """See the function `hosting`."""
        with self._start:
            host = None if self._host is not None else _Host(wake)
            self._host = self._host or host
        try:
            yield
        finally:
            if host is not None:
                self._host = None  # callers that wait then offer their jobs to the module's thread
                end_own_team()

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
                end_own_team()
                job = self._jobs.get()
            self._run_job(job)
            del job  # or the last caller's session would be held until the next call

    def _run_job(self, job: _Job) -> None:
        # Claimed under the lock only: until then the host may run it, or its caller give up.
        with self.lock:
            if job.claim():
                job.run()


_worker = ComputeWorker()


def computes_here() -> bool:
    """Whether the calling thread holds the compute lock."""
    return _worker.holds_lock


def computing() -> AbstractContextManager[Any]:
    """Return the compute lock, a context manager; the thread that holds it may take it again.

    Ctrl-C ends the wait for it. What uses all cores is to be a function under `computes`.
    """
    return _worker.lock


@contextmanager
def hosting(wake: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Compute the steps of all threads in the calling thread, until the block ends.

    A second thread that would host at the same time hands its steps over to the first.

    wake: makes the calling thread call a function soon, if it is waiting for something to do.
    """
    with _worker.hosting(wake):
        yield


def computes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run the function under the compute lock, in the one thread that computes.

    For a step, and for what takes a moment: once it has begun, Ctrl-C waits for its end.
    """

    @wraps(function)
    def run_in_turn(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        worker = _worker
        if worker.holds_lock:
            return function(*args, **kwargs)
        if worker.is_host:
            worker.run_waiting()
            with worker.lock:
                return function(*args, **kwargs)
        end_own_team()  # other work of the calling thread may have left one
        result: _Result = worker.run(partial(function, *args, **kwargs))
        return result

    return run_in_turn


def computes_itself(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run the function under the compute lock, in the calling thread.

    For what may take long: in the main thread Ctrl-C ends it after the current step.
    """

    @wraps(function)
    def run_here(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        worker = _worker
        if worker.holds_lock:
            return function(*args, **kwargs)
        if worker.is_host:
            worker.run_waiting()
            with worker.lock:
                return function(*args, **kwargs)
        caller = object()
        try:
            worker.waiting.add(caller)
            with worker.lock:
                worker.waiting.discard(caller)
                try:
                    return function(*args, **kwargs)
                finally:
                    end_own_team()
        finally:
            worker.waiting.discard(caller)

    return run_here


def end_own_team() -> None:
    """End the OpenMP threads that wait for the calling thread, if there are any.

    Only with GNU's library, and a version that can: LLVM's would stop those of all threads.
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
    os.register_at_fork(before=end_own_team, after_in_child=reset)
