"""SIGTERM ends a command as Ctrl-C does: with what was done saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


def terminated() -> bool:
    """Whether SIGTERM came."""
    return _asked.is_set()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block, SIGTERM does what SIGINT would, and `terminated` says so.

    Where the program that started this one has set SIGTERM to be handled otherwise, it stays so.
    """
    _asked.clear()
    usual = signal.getsignal(signal.SIGTERM)
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or usual is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _asked.set()
    as_usual = signal.getsignal(signal.SIGINT)
    if callable(as_usual):
        as_usual(signal.SIGINT, frame)
    else:  # ignored, as in a background job of a script
        raise KeyboardInterrupt
