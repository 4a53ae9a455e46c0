"""Signals that end or suspend a command, and keys typed during an answer."""

import os
import signal
import stat
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kvkeep.cli.output import discard
from kvkeep.runtime.signals import interrupts_deferred

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []
_suspensions: list[None] = []
_IFLAG, _LFLAG, _CC = 0, 3, 6  # indices in the list of termios.tcgetattr


def termination_signal() -> int | None:
    """Return the SIGTERM or SIGHUP that ended the command, if any."""
    return _received[-1] if _received else None


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as Ctrl-C within the block, so that work is saved.

    `termination_signal` returns them. A signal that the parent process ignores, as `nohup` does,
    stays ignored.
    """
    _received.clear()
    is_main_thread = threading.current_thread() is threading.main_thread()
    handled = [
        number
        for number in _TERMINATION_SIGNALS
        if is_main_thread and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in handled:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    _discard_output_to_closed_terminals()
    sigint_handler = signal.getsignal(signal.SIGINT)
    if callable(sigint_handler):
        sigint_handler(number, frame)
    else:  # SIGINT is ignored, as in a background job of a script
        raise KeyboardInterrupt


def _discard_output_to_closed_terminals() -> None:
    """Redirect output from closed terminals to the null device, so that saving goes on."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            descriptor = stream.fileno()
            # A closed terminal is still a character device, but no longer a terminal.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                discard(stream)


def suspensions() -> int:
    """Return how often Ctrl-Z suspended this process. Each time, the screen may have changed."""
    return len(_suspensions)


@contextmanager
def type_ahead() -> Iterator[None]:
    """Hold typed keys back without echo during the block, for the next prompt.

    Ctrl-C, Ctrl-Z and Ctrl-S still act at once. Without a terminal or in the background, nothing
    changes.
    """
    mode = _NoEchoMode(sys.stdin.fileno())
    handles_suspension = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
    if handles_suspension:
        signal.signal(signal.SIGTSTP, mode.suspend)
    try:
        mode.enter()
        yield
    finally:
        with interrupts_deferred():
            mode.leave()
            if handles_suspension:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)


class _NoEchoMode:
    """A terminal mode without echo and without line editing."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._saved: list[Any] | None = None  # the attributes to restore

    def enter(self) -> None:
        with suppress(termios.error, OSError):
            if not self._is_foreground():
                return  # changing a terminal from the background stops the process
            saved = termios.tcgetattr(self._descriptor)
            mode = [*saved[:_CC], list(saved[_CC])]
            mode[_IFLAG] &= ~termios.ICRNL
            mode[_LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[_LFLAG] |= termios.NOFLSH  # Ctrl-C discards neither typed keys nor pending output
            mode[_CC][termios.VMIN], mode[_CC][termios.VTIME] = 1, 0
            self._saved = saved
            termios.tcsetattr(self._descriptor, termios.TCSANOW, mode)

    def leave(self) -> None:
        saved, self._saved = self._saved, None
        with suppress(termios.error, OSError):
            if saved is not None and self._is_foreground():
                termios.tcsetattr(self._descriptor, termios.TCSANOW, saved)

    def suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, suspend, and change it again."""
        self.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        _suspensions.append(None)
        signal.signal(number, self.suspend)
        self.enter()

    def _is_foreground(self) -> bool:
        return is_foreground(self._descriptor)


def is_foreground(descriptor: int) -> bool:
    """Whether this process may read from a terminal without being stopped. Raises OSError."""
    return os.tcgetpgrp(descriptor) == os.getpgrp()
