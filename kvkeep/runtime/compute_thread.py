"""The thread that computes for all others.

Each thread that enters OpenMP has a team of its own there. With a second team there are more
threads than cores, and OpenMP then lets all of them sleep between two products instead of waiting
for the next; a new thread also has its products prepared anew. So one computes for all, in the
order in which they asked, and its team ends where nobody asks for a while.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import torch

_SOFT = 1  # omp_pause_soft
_PATIENCE = 0.05  # seconds without work after which the team ends


class _Work:
    """A call that another thread does. threads: that it computes on, which torch has by thread."""

    def __init__(self, call: Callable[[], Any]):
        self.call: Callable[[], Any] | None = call
        self.threads = torch.get_num_threads()
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def claim(self) -> bool:
        """Whether nobody has: who does it, or who no longer waits for it."""
        return self._begun.acquire(blocking=False)

    def do(self) -> None:
        assert self.call is not None
        try:
            if self.threads != torch.get_num_threads():
                torch.set_num_threads(self.threads)
            self.result = self.call()
        except BaseException as error:
            self.error = error
        self.call, self.over = None, True  # what it holds is the caller's again
        self._done.release()

    def wait(self) -> None:
        while not self.over:
            self._done.acquire()


class ComputeThread:
    """Does calls for others, one after the other; it is started with the first of them."""

    def __init__(self) -> None:
        self._asked = SimpleQueue[_Work]()
        self._start = threading.RLock()  # what breaks a call off may leave it taken
        self._thread: threading.Thread | None = None

    @property
    def is_this(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def done(self, call: Callable[[], Any]) -> Any:
        """What `call()` returns or raises, in that thread.

        Ctrl-C ends the wait for its turn. Once it has begun it is waited for, whatever comes.
        """
        self._require_started()
        work = _Work(call)
        try:
            self._asked.put(work)
            work.wait()
        except BaseException:  # of a signal's handler, in the main thread
            while not work.claim() and not work.over:
                with suppress(BaseException):
                    work.wait()
            raise
        # The error's traceback holds this frame, and that of `do`, which holds the work. Were the
        # error still in either, what the call looked at would stay until garbage is collected.
        error, work.error = work.error, None
        try:
            if error is not None:
                raise error
            return work.result
        finally:
            del work, error

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
                work = self._asked.get(timeout=_PATIENCE)
            except Empty:
                end_own_team()
                work = self._asked.get()
            if work.claim():
                work.do()
            del work  # or the last caller's session would be held until the next one asks


def end_own_team() -> None:
    """Ends the OpenMP threads that wait for this one, if there are any.

    Where the library is GNU's, and new enough to: LLVM's stops those of all threads.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], object] | None:
    process = ctypes.CDLL(None)
    if hasattr(process, "__kmpc_fork_call"):
        return None
    return getattr(process, "omp_pause_resource_all", None)


if hasattr(os, "register_at_fork"):
    # A team's threads are not in the child, and OpenMP would wait for them there.
    os.register_at_fork(before=end_own_team)
