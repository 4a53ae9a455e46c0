"""Ctrl-C between steps instead of in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds one Ctrl-C back until the block is done, so that what the block did is kept whole.

    A second Ctrl-C does not wait. Outside the main thread, where Python delivers no signals, or
    where the program handles SIGINT in another way than by a Python function, nothing is held.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            usual(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if len(held) == 1:
            usual(*held[0])
