"""The thread of an engine: it runs scheduler steps and, between them, calls of other threads."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from kvkeep.engine.exit_pause import ExitPause, process_is_ending, threads_may_run
from kvkeep.errors import Cancelled
from kvkeep.runtime.worker import OPENMP_TIMEOUT_SECONDS, hosting, release_openmp_threads

_log = logging.getLogger("kvkeep.engine")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Call:
    """A function, the future of its result, and whether it takes turns: see `EngineThread`."""

    function: Callable[[], Any]
    future: Future[Any]
    is_long: bool = False

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)


class LongFuture(Future[T]):
    """The result of a long call. Cancelling it ends also a call that runs, at its next turn."""

    is_unwanted = False  # whether it was cancelled, also while the call runs

    def cancel(self) -> bool:
        """Cancel the call; returns whether it has not begun."""
        self.is_unwanted = True
        return super().cancel()


class EngineThread:
    """Runs all waiting calls in the order in which they came, then a step, and so on.

    Calls that come meanwhile wait for that step, so that no number of them delays a generation. A
    *long* call runs the short ones that wait, and a step, at each of its turns (`take_turn`).
    Other long calls wait until it is done. A step that fails is logged, and the next one follows as
    if there were no more to do.

    While it runs, it is the thread that computes for the whole process (`kvkeep.runtime.worker`).
    """

    def __init__(
        self,
        step: Callable[[], bool],
        idle_seconds: float,
        on_end: Callable[[], None],
        may_end: Callable[[], bool] = lambda: True,
    ):
        """step: returns whether to step again at once; if not, the next step follows the next call,
        or comes after `idle_seconds`. on_end: runs in the thread, after the last step, whatever has
        failed. may_end: whether the thread may end once it is closing; False while something waits
        for a call."""
        self._may_end = may_end
        self._step, self._idle_seconds, self._on_end = step, idle_seconds, on_end
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._deferred = deque[_Call]()  # long calls that came during another one
        self._long_future: Future[Any] | None = None  # of the long call that runs
        self.closing, self._ended = threading.Event(), threading.Event()
        self._deadline = math.inf  # once it is closing: time until which long work may go on
        self._exit_pause = ExitPause()
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in the thread. The future raises Cancelled if the thread is ending."""
        return self._submit(partial(function, *args, **kwargs), is_long=False)

    def submit_long(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function that calls `take_turn` between its steps; otherwise as `submit`.

        The future is a `LongFuture`.
        """
        return self._submit(partial(function, *args, **kwargs), is_long=True)

    def _submit(self, function: Callable[[], T], is_long: bool) -> Future[T]:
        future: Future[T] = LongFuture() if is_long else Future()
        if self.closing.is_set():
            future.set_exception(Cancelled("the engine is shut down"))
        elif process_is_ending():
            future.set_exception(Cancelled("the process ends: the engine can only be closed"))
        else:
            self._calls.put(_Call(function, future, is_long))
            if self._ended.is_set():  # it ended before it could see this call
                self._refuse_calls()
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, even while it is ending."""
        self._calls.put(_Call(function, Future()))

    def take_turn(self) -> None:
        """Run the short calls that wait, and a step: called in the thread, by a long call."""
        for _ in range(self._calls.qsize()):  # those that come meanwhile wait for the next turn
            call = self._calls.get_nowait()
            if call.is_long:
                self._deferred.append(call)
            else:
                call.run()
        self._try_step()

    @property
    def past_deadline(self) -> bool:
        """Whether the thread is closing, and the grace of what runs is over."""
        return self.closing.is_set() and time.monotonic() >= self._deadline

    @property
    def is_unwanted(self) -> bool:
        """Whether the long call that runs was cancelled."""
        return isinstance(self._long_future, LongFuture) and self._long_future.is_unwanted

    def close(self, grace: float = 0.0) -> None:
        """Accept no more calls, and wait for the end. grace: see `Engine.close`."""
        self._deadline = min(time.monotonic() + grace, self._deadline)
        self.closing.set()
        self.post(lambda: None)  # wakes it
        with threads_may_run():
            # Before CPython 3.13, an interrupted `join` takes the thread for ended.
            while self._thread.is_alive() and not self._ended.wait(1.0):
                pass
            self._thread.join()

    def _run(self) -> None:
        try:
            # It runs steps of sessions outside the engine, too.
            with self._exit_pause, hosting(self.post):
                try:
                    self._run_until_closed()
                finally:
                    self._on_end()
        finally:  # however it ends, no caller may wait forever
            self.closing.set()
            self._ended.set()
            self._refuse_calls()

    @property
    def _is_ending(self) -> bool:
        return self.closing.is_set() and self._may_end()

    def _run_until_closed(self) -> None:
        """Run calls and steps until no call can come and no step has more to do.

        A call that was accepted during the last step before the end may start more work.
        """
        has_work = is_last = False  # whether the last step asked for another one
        while has_work or self._calls.qsize() or not (is_last and self._may_end()):
            is_last = self.closing.is_set()
            self._run_calls(wait=not has_work)
            has_work = self._try_step()

    def _try_step(self) -> bool:
        """Run a step; returns whether to step again at once, which a failed one does not."""
        self._exit_pause.wait_if_ending()
        try:
            return self._step()
        except Exception:  # no request of another caller may suffer from it
            _log.exception("a step of the engine failed")
            return False

    def _refuse_calls(self) -> None:
        """Fail all waiting calls with Cancelled."""
        with suppress(Empty):
            while True:
                future = self._next_call(wait=False).future
                if future.set_running_or_notify_cancel():
                    future.set_exception(Cancelled("the engine is shut down"))

    def _run_calls(self, wait: bool) -> None:
        """Run the calls that wait now. wait: if there is none, wait for the first one."""
        num_left = len(self._deferred) + self._calls.qsize()
        wait = wait and not num_left and not self._is_ending
        while num_left or wait:
            try:
                call = self._next_call(wait)
            except Empty:  # a long call has run those that were waiting
                return
            num_left = self._calls.qsize() if wait else num_left - 1
            wait = False
            self._long_future = call.future if call.is_long else None
            call.run()
            self._long_future = None
            del call  # it holds objects of the caller

    def _next_call(self, wait: bool) -> _Call:
        """Return the next call. wait: for `idle_seconds` at most. Raises Empty if there is none."""
        if self._deferred:
            return self._deferred.popleft()
        if not wait:
            return self._calls.get_nowait()
        with self._exit_pause.idle():
            with suppress(Empty):
                return self._calls.get(timeout=min(OPENMP_TIMEOUT_SECONDS, self._idle_seconds))
            release_openmp_threads()  # idle ones would slow other threads down
            return self._calls.get(timeout=self._idle_seconds)


def flatten_future(outer: Future[Future[T]]) -> Future[T]:
    """Return a future with the result of the future that is the result of `outer`.

    It is cancelled if one of these is. Cancelling it cancels none of them.
    """
    flat: Future[T] = Future()

    def forward_result(future: Future[Any]) -> None:
        if future.cancelled():
            flat.cancel()
        elif future is outer and future.exception() is None:
            future.result().add_done_callback(forward_result)
            return
        if not flat.set_running_or_notify_cancel():  # cancelled, perhaps by its caller
            return
        if error := future.exception():
            flat.set_exception(error)
        else:
            flat.set_result(future.result())

    outer.add_done_callback(forward_result)
    return flat
