"""Ctrl-C between steps instead of in the middle of one."""

import threading

# Not `signal.signal`, which converts handlers to enums and back: 50 us of each token.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT
from types import FrameType

_HandlerArguments = tuple[int, FrameType | None]


@contextmanager
def interrupts_deferred(only_first: bool = False) -> Iterator[None]:
    """Defer every Ctrl-C until the block is done, so that it is never interrupted halfway.

    Nothing is deferred outside the main thread, since Python delivers signals only there, or if the
    program's SIGINT handler is no Python function.

    only_first: let a second Ctrl-C interrupt the block, for both; for long work that can be ended
        anywhere, such as writing a file that counts only when complete.
    """
    handler, deferred = getsignal(SIGINT), list[_HandlerArguments]()
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def defer(signal_number: int, frame: FrameType | None) -> None:
        deferred.append((signal_number, frame))
        if only_first and len(deferred) > 1:
            deferred.clear()
            signal(SIGINT, handler)
            handler(signal_number, frame)

    signal(SIGINT, defer)
    try:
        yield
    finally:
        signal(SIGINT, handler)
        for arguments in deferred:
            handler(*arguments)
