"""Ctrl-C between steps instead of in the middle of one."""

import threading

# Not `signal.signal`, which converts handlers to enums and back: 50 us of each token.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from signal import SIGINT
from types import FrameType

_Signal = tuple[int, FrameType | None]


def interrupts_deferred() -> AbstractContextManager[None]:
    """Defer every Ctrl-C until the block is done, so that what the block did is kept whole.

    For what takes a moment: nothing can end it sooner. Outside the main thread, to which Python
    delivers no signals, or if the program handles SIGINT by something other than a Python function,
    nothing is deferred.
    """
    return _deferring(only_first=False)


def first_interrupt_deferred() -> AbstractContextManager[None]:
    """Defer one Ctrl-C until the block is done; a second one does not wait.

    For what may take long and can be ended anywhere, such as a file that counts only once all of it
    is there. Otherwise as `interrupts_deferred`.
    """
    return _deferring(only_first=True)


@contextmanager
def _deferring(only_first: bool) -> Iterator[None]:
    """Defer Ctrl-C until the block is done. only_first: a second one calls the handler at once."""
    handler, deferred = getsignal(SIGINT), list[_Signal]()
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def defer(number: int, frame: FrameType | None) -> None:
        if only_first and deferred:
            handler(number, frame)
        deferred.append((number, frame))

    signal(SIGINT, defer)
    try:
        yield
    finally:
        signal(SIGINT, handler)
        if not only_first or len(deferred) == 1:
            for arguments in deferred:
                handler(*arguments)
