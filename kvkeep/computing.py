"""One thread computes at a time, so that sessions may be used from several.

A step uses all cores by itself: two at once would take them from each other, and be slower than one
after the other. And sessions share memory (forks their cells, all of them the model), which only
one at a time may change. So there is one lock for the process. It is held for one step of a prompt,
one token, one edit, one snapshot; between two of them another thread has its turn.

The first thread that computes does so itself. From the moment that a second one wants to, a thread
of our own does it for all (`kvkeep.compute_thread`), in the order in which they asked.
"""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from kvkeep.compute_thread import ComputeThread, end_own_team

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


class _Turns:
    """Who computes in this process.

    taken: whether a thread computed yet. shared: whether another one did since.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = ComputeThread()
        self.taken = self.shared = False
        self._of_thread = threading.local()  # not by its number, which the next one may be given
        self._changing = threading.RLock()  # what breaks a call off may leave it taken

    def here(self) -> bool:
        """Whether this thread is to compute itself, rather than to have it done."""
        first = getattr(self._of_thread, "first", False)
        if first and not self.shared:
            return True
        if self.thread.is_this or self.lock._is_owned():  # type: ignore[attr-defined]
            return True
        if not self.shared:
            with self._changing:
                if not self.taken:
                    self.taken = self._of_thread.first = True
                    return True
                self.shared = True
        if first:  # once, and its team would be one too many from here on
            self._of_thread.first = False
            end_own_team()
        return False


_TURNS = _Turns()


def computing() -> AbstractContextManager[Any]:
    """A block under it is run while no other thread computes.

    Within it, whoever holds the lock may take it again. Ctrl-C ends the wait for it. What takes all
    cores is to be a function under `computes`.
    """
    return _TURNS.lock


def computes(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """The same function, run as a block under `computing()` is; by whom is seen when it is called.

    Ctrl-C in a thread that has it done by another waits for its end, once it has begun.
    """

    def locked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        with _TURNS.lock:
            return function(*args, **kwargs)

    @wraps(function)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        if _TURNS.here():
            return locked(*args, **kwargs)
        returned: _Returned = _TURNS.thread.done(partial(locked, *args, **kwargs))
        return returned

    return alone


def _begin_anew() -> None:
    """In a forked child: of the threads that computed only this one is there."""
    global _TURNS
    _TURNS = _Turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
