"""The pause of the engines' threads while the process ends.

Before CPython 3.14 a daemon thread is ended where it next takes the GIL once the interpreter
finalizes. Inside of torch that aborts the process, even if a tensor is only freed there. The
compute lock keeps such threads from computing (`kvkeep.runtime.worker`), but an engine's thread
frees tensors between its steps, too: it stops here before the interpreter finalizes.
"""

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from kvkeep.runtime.worker import others_may_compute

_EXIT_SECONDS = 5.0  # in which the threads can complete their steps when the process ends


class ExitPause:
    """The places at which one thread stops while the process ends; entered while it runs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the thread, except at its pauses

    def __enter__(self) -> None:
        self.lock.acquire()
        _end.pauses.add(self)

    def __exit__(self, *failure: object) -> None:
        _end.pauses.discard(self)
        self.lock.release()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Let the process end during the block, in which the thread only waits."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def wait_if_ending(self) -> None:
        """Wait, between two steps, while the process ends."""
        if process_is_ending():
            with self.idle():
                _end.may_run.wait()


class _ProcessEnd:
    """The threads that run, and those that are paused because the process ends."""

    def __init__(self) -> None:
        self.pauses = WeakSet[ExitPause]()
        self.may_run = threading.Event()
        self.may_run.set()
        self.thread_id: int | None = None  # of the thread that ends the process
        self._paused = list[ExitPause]()

    def pause_threads(self) -> None:
        self.may_run.clear()
        self.thread_id = threading.get_ident()
        deadline = time.monotonic() + _EXIT_SECONDS
        for pause in list(self.pauses):
            if pause.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._paused.append(pause)

    def resume_threads(self) -> None:
        self.may_run.set()
        while self._paused:
            self._paused.pop().lock.release()


_end = _ProcessEnd()


@atexit.register
def _pause_threads() -> None:
    _end.pause_threads()  # of a forked child: another one


def process_is_ending() -> bool:
    """Whether the engines' threads stop because the process ends."""
    return not _end.may_run.is_set()


@contextmanager
def threads_may_run() -> Iterator[None]:
    """Let the engines' threads run during the block, if this thread has stopped them."""
    if not process_is_ending() or _end.thread_id != threading.get_ident():
        yield
        return
    _end.resume_threads()
    try:
        with others_may_compute():
            yield
    finally:
        _end.pause_threads()


def _replace_process_end() -> None:
    """Forget the threads of the parent, which do not exist in a forked child."""
    global _end
    _end = _ProcessEnd()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_process_end)
