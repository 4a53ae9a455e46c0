"""One thread computes at a time, so that sessions may be used from several.

A step uses all cores by itself: two at once would take them from each other, and be slower than one
after the other. And sessions share memory (forks their cells, all of them the model), which only
one at a time may change. So there is one lock for the process. It is held for one step of a prompt,
one token, one edit, one snapshot; between two of them another thread has its turn.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


@contextmanager
def computing() -> Iterator[None]:
    """The block, or the function that it decorates, is run while no other thread computes.

    Within it, whoever holds the lock may take it again. Ctrl-C ends the wait for it.
    """
    with _LOCK:
        yield
