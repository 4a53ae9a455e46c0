"""SIGTERM and a closed terminal end a command as Ctrl-C does: with what was done saved."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kvkeep.cli.output import discard

_SIGNALS = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
_came: list[int] = []


def termination_signal() -> int | None:
    """The signal that asked the command to end, other than Ctrl-C's; None if none did."""
    return _came[-1] if _came else None


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP do what SIGINT would, and `terminated` says so.

    Where the program that started this one has set one to be handled otherwise, as `nohup` does, it
    stays so.
    """
    _came.clear()
    main_thread = threading.current_thread() is threading.main_thread()
    ours = [s for s in _SIGNALS if main_thread and signal.getsignal(s) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    _leave_closed_terminals()
    as_usual = signal.getsignal(signal.SIGINT)
    if callable(as_usual):
        as_usual(number, frame)
    else:  # ignored, as in a background job of a script
        raise KeyboardInterrupt


def _leave_closed_terminals() -> None:
    """Lets what is written to a terminal that is gone go nowhere, so that saving goes on."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            number = stream.fileno()
            # A terminal that was closed is a device still, and no terminal.
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                discard(stream)
