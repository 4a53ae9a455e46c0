"""The thread in which an engine does everything: what others ask of it, and its turns."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvkeep.errors import Cancelled

T = TypeVar("T")


@dataclass
class _Call:
    """What somebody wants done."""

    function: Callable[[], Any]
    future: Future[Any]


class EngineThread:
    """Does calls in the order in which they came, and a turn after all that are there.

    turn: says whether there is more to do without another call. idle: seconds after which a turn is
    due where there is not. end: is called last, once `close` was and the last turn had no more.
    """

    def __init__(self, turn: Callable[[], bool], idle: float, end: Callable[[], None]):
        self._turn, self._idle, self._end = turn, idle, end
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self.closing, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What a function gives that is run there. Cancelled where the thread is about to end."""
        future: Future[T] = Future()
        if self.closing.is_set():
            future.set_exception(Cancelled("the engine has ended"))
        else:
            self._calls.put(_Call(function, future))
            if self._over.is_set():  # it ended meanwhile, and has looked for the last time
                self._refuse_calls()
        return future

    def post(self, function: Callable[[], None]) -> None:
        """To be done there, even as it ends."""
        self._calls.put(_Call(function, Future()))

    def close(self) -> None:
        """Takes no more calls, and waits for the end."""
        self.closing.set()
        self.post(lambda: None)
        self._thread.join()

    def _run(self) -> None:
        more = False
        try:
            while more or not self.closing.is_set():
                self._do_calls(wait=not more)
                more = self._turn()
            self._do_calls(wait=False)
            self._end()
        finally:  # however it ends, nobody is to wait for it
            self.closing.set()
            self._over.set()
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        """Those that came as it ended."""
        with suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                if call.future.set_running_or_notify_cancel():
                    call.future.set_exception(Cancelled("the engine has ended"))

    def _do_calls(self, wait: bool) -> None:
        """All that are there; where there is nothing else to do, waits for one."""
        while True:
            try:
                call = self._calls.get(wait and not self.closing.is_set(), timeout=self._idle)
            except Empty:
                return
            wait = False
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                call.future.set_result(call.function())
            except BaseException as error:
                call.future.set_exception(error)
            del call  # what it holds is the caller's
