"""Ctrl-C between steps instead of in the middle of one."""

import threading

# Not `signal.signal`, which converts handlers to enums and back: 50 us of each token.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]
_Signal = tuple[int, FrameType | None]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer every Ctrl-C until the block is done, so that what the block did is kept whole.

    For what takes a moment: nothing can end it sooner. Outside the main thread, to which Python
    delivers no signals, or if the program handles SIGINT by something other than a Python function,
    nothing is deferred.
    """
    handler, deferred = _python_handler(), list[_Signal]()
    if handler is None:
        yield
        return
    signal(SIGINT, lambda number, frame: deferred.append((number, frame)))
    try:
        yield
    finally:
        signal(SIGINT, handler)
        for arguments in deferred:
            handler(*arguments)


@contextmanager
def first_interrupt_deferred() -> Iterator[None]:
    """Defer one Ctrl-C until the block is done; a second one does not wait.

    For what may take long and can be ended anywhere, such as a file that counts only once all of it
    is there. Otherwise as `interrupts_deferred`.
    """
    handler, deferred = _python_handler(), list[_Signal]()
    if handler is None:
        yield
        return

    def defer(number: int, frame: FrameType | None) -> None:
        if deferred:
            handler(number, frame)
        deferred.append((number, frame))

    signal(SIGINT, defer)
    try:
        yield
    finally:
        signal(SIGINT, handler)
        if len(deferred) == 1:
            handler(*deferred[0])


def _python_handler() -> _Handler | None:
    """Return the SIGINT handler; None if it cannot be deferred here."""
    handler = getsignal(SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    return handler if in_main_thread and callable(handler) else None
