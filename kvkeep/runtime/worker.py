"""One thread computes at a time, so that sessions may be used from several.

A step uses all cores by itself: two at once would take them from each other, and be slower than one
after the other. And sessions share memory (forks their cells, all of them the model), which only
one at a time may change. So there is one lock for the process. It is held for one step of a prompt,
one token, one edit, one snapshot; between two of them another thread has its turn.

A step is computed by a thread of our own, whoever asks (`kvkeep.runtime.compute_thread`), in the
order in which they asked. What may take long, and can be broken off by Ctrl-C, is computed by
the calling thread.
"""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from kvkeep.runtime.compute_thread import ComputeThread, end_own_team

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


class _Turns:
    """Who computes in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = ComputeThread()

    @property
    def are_here(self) -> bool:
        """Whether this thread computes already."""
        return self.thread.is_this or bool(self.lock._is_owned())  # type: ignore[attr-defined]


_TURNS = _Turns()


def computing() -> AbstractContextManager[Any]:
    """A block under it is run while no other thread computes.

    Within it, whoever holds the lock may take it again. Ctrl-C ends the wait for it. What takes all
    cores is to be a function under `computes`.
    """
    return _TURNS.lock


def computes(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """The same function, run as a block under `computing()` is, by the thread that does so for all.

    For a step, and for what takes a moment: Ctrl-C waits for its end, once it has begun.
    """

    def locked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        with _TURNS.lock:
            return function(*args, **kwargs)

    @wraps(function)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        if _TURNS.are_here:
            return locked(*args, **kwargs)
        end_own_team()  # what else this thread computes may have left one
        returned: _Returned = _TURNS.thread.done(partial(locked, *args, **kwargs))
        return returned

    return alone


def computes_itself(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """The same function, run as a block under `computing()` is, in the thread that calls it.

    For what may take long: in the main thread Ctrl-C ends it after the step that it is at.
    """

    @wraps(function)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        if _TURNS.are_here:
            return function(*args, **kwargs)
        with _TURNS.lock:
            try:
                return function(*args, **kwargs)
            finally:
                end_own_team()

    return alone


def _begin_anew() -> None:
    """In a forked child: of the threads that computed only this one is there."""
    global _TURNS
    _TURNS = _Turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
