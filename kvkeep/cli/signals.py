"""SIGTERM and SIGHUP end a command as Ctrl-C does: its work is saved first."""

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
_received: list[int] = []


def termination_signal() -> int | None:
    """Return the signal that ended the command, SIGTERM or SIGHUP; None if there was none."""
    return _received[-1] if _received else None


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as SIGINT within the block; `termination_signal` returns them.

    A signal that the parent process set to be ignored, as `nohup` does, stays ignored.
    """
    _received.clear()
    main_thread = threading.current_thread() is threading.main_thread()
    handled = [s for s in _SIGNALS if main_thread and signal.getsignal(s) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    _leave_closed_terminals()
    sigint_handler = signal.getsignal(signal.SIGINT)
    if callable(sigint_handler):
        sigint_handler(number, frame)
    else:  # SIGINT is ignored, as in a background job of a script
        raise KeyboardInterrupt


def _leave_closed_terminals() -> None:
    """Redirect output to a closed terminal to the null device, so that saving can go on."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            number = stream.fileno()
            # A closed terminal is still a character device, but no longer a terminal.
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                discard(stream)
