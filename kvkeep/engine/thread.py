"""The thread in which an engine does everything: calls from other threads, and scheduler steps."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from kvkeep.errors import Cancelled
from kvkeep.runtime.worker import TEAM_PATIENCE, hosting, release_openmp_threads

P = ParamSpec("P")
T = TypeVar("T")
_Call = tuple[Callable[[], Any], Future[Any]]  # the future is that of the function's result


class EngineThread:
    """Runs all waiting calls in the order in which they came, then a step, and so on.

    It is the thread that computes for the whole process while it runs (`kvkeep.runtime.worker`).
    step: returns whether there is more to do without another call. idle: seconds after which a step
    is due if there is not. end: called last, once `close` was called and the last step had no more.
    """

    def __init__(self, step: Callable[[], bool], idle: float, end: Callable[[], None]):
        self._step, self._idle, self._end = step, idle, end
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self.closing, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in the thread. The future has Cancelled if the thread is about to end."""
        future: Future[T] = Future()
        if self.closing.is_set():
            future.set_exception(Cancelled("the engine has ended"))
        else:
            self._calls.put((partial(function, *args, **kwargs), future))
            if self._ended.is_set():  # meanwhile, after its last look at the calls
                self._refuse_calls()
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, even while it is ending."""
        self._calls.put((function, Future()))

    def close(self) -> None:
        """Accept no more calls, and wait for the end."""
        self.closing.set()
        self.post(lambda: None)
        self._thread.join()

    def _run(self) -> None:
        more = False
        try:
            with hosting(self.post):
                while more or not self.closing.is_set():
                    self._run_calls(wait=not more)
                    more = self._step()
                self._run_calls(wait=False)
                self._end()
        finally:  # however it ends, no caller may wait for ever
            self.closing.set()
            self._ended.set()
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        """Cancel the calls that came while the thread was ending."""
        with suppress(Empty):
            while True:
                _, future = self._calls.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(Cancelled("the engine has ended"))

    def _run_calls(self, wait: bool) -> None:
        """Run all waiting calls. wait: for the first one, if there is none."""
        while True:
            try:
                function, future = self._next_call(wait and not self.closing.is_set())
            except Empty:
                return
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future  # they hold objects of the caller

    def _next_call(self, wait: bool) -> _Call:
        """Return the next call. Raises Empty if none comes while the thread may be idle."""
        if not wait:
            return self._calls.get_nowait()
        with suppress(Empty):
            return self._calls.get(timeout=min(TEAM_PATIENCE, self._idle))
        release_openmp_threads()
        return self._calls.get(timeout=self._idle)


def flatten(outer: Future[Future[T]]) -> Future[T]:
    """Return a future of the result of the future that is the result of `outer`."""
    flat: Future[T] = Future()

    def forward(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            flat.set_exception(error)
        elif future is outer:
            future.result().add_done_callback(forward)
        else:
            flat.set_result(future.result())

    outer.add_done_callback(forward)
    return flat
