"""Ctrl-C between steps instead of in the middle of one."""

import threading

# Not `signal.signal`, which makes enums of handlers and back: 50 us of each token.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]
_Signal = tuple[int, FrameType | None]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds every Ctrl-C back until the block is done, so that what the block did is kept whole.

    For what takes a moment: nobody can end it sooner. Outside the main thread, where Python
    delivers no signals, or where the program handles SIGINT in another way than by a Python
    function, nothing is held.
    """
    usual, held = _usual(), list[_Signal]()
    if usual is None:
        yield
        return
    signal(SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal(SIGINT, usual)
        for each in held:
            usual(*each)


@contextmanager
def first_interrupt_deferred() -> Iterator[None]:
    """Holds one Ctrl-C back until the block is done; a second one does not wait.

    For what may take long and can be broken off anywhere, such as a file that counts only once all
    of it is there. Otherwise as `interrupts_deferred`.
    """
    usual, held = _usual(), list[_Signal]()
    if usual is None:
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            usual(number, frame)
        held.append((number, frame))

    signal(SIGINT, hold)
    try:
        yield
    finally:
        signal(SIGINT, usual)
        if len(held) == 1:
            usual(*held[0])


def _usual() -> _Handler | None:
    """What a Ctrl-C does otherwise; None where nothing can be held back."""
    usual = getsignal(SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    return usual if main_thread and callable(usual) else None
