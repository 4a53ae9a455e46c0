"""One thread computes at a time, so that sessions may be used from several.

A step uses all cores by itself: two at once would take them from each other, and be slower than one
after the other. And sessions share memory (forks their cells, all of them the model), which only
one at a time may change. So there is one lock for the process. It is held for one step of a prompt,
one token, one edit, one snapshot; between two of them another thread has its turn.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")

_LOCK = threading.RLock()


def computing() -> AbstractContextManager[Any]:
    """A block under it is run while no other thread computes.

    Within it, whoever holds the lock may take it again. Ctrl-C ends the wait for it.
    """
    return _LOCK


def computes(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """The same function, run as a block under `computing()` is."""

    @wraps(function)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        with _LOCK:
            return function(*args, **kwargs)

    return alone
