"""Signals that end or suspend a command, and keys typed while the model answers."""

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

from kvkeep.cli.output import redirect_to_null
from kvkeep.runtime.signals import interrupts_deferred

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_received_signals: list[int] = []
_suspension_count = 0
_IFLAG, _LFLAG, _CC = 0, 3, 6  # indices in the list of termios.tcgetattr


def termination_signal() -> int | None:
    """Return the SIGTERM or SIGHUP that ended the command, if any."""
    return _received_signals[-1] if _received_signals else None


@contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as Ctrl-C within the block, so that work is saved.

    A signal that the parent process ignores, as `nohup` does, stays ignored.
    """
    _received_signals.clear()
    is_main_thread = threading.current_thread() is threading.main_thread()
    handled_signals = [
        signal_number
        for signal_number in _TERMINATION_SIGNALS
        if is_main_thread and signal.getsignal(signal_number) is signal.SIG_DFL
    ]
    for signal_number in handled_signals:
        signal.signal(signal_number, _interrupt)
    try:
        yield
    finally:
        for signal_number in handled_signals:
            signal.signal(signal_number, signal.SIG_DFL)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM or SIGHUP: record the signal, and do what Ctrl-C does."""
    _received_signals.append(signal_number)
    _discard_output_to_closed_terminals()
    sigint_handler = signal.getsignal(signal.SIGINT)
    if callable(sigint_handler):
        sigint_handler(signal_number, frame)
    else:  # SIGINT is ignored, as in a background job of a script
        raise KeyboardInterrupt


def _discard_output_to_closed_terminals() -> None:
    """Redirect output from closed terminals to the null device, so that saving goes on."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            descriptor = stream.fileno()
            # A closed terminal is still a character device, but no longer a terminal.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                redirect_to_null(stream)


def suspension_count() -> int:
    """Return how often Ctrl-Z suspended this process. Each time, the screen may have changed."""
    return _suspension_count


@contextmanager
def hold_typed_keys() -> Iterator[None]:
    """Leave typed keys, unechoed, in the terminal's input during the block, for the next prompt.

    Ctrl-C, Ctrl-Z and Ctrl-S still act. In the background or without a terminal, nothing changes.
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
    """A mode of a terminal, without echo and line editing. descriptor: the terminal's."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._saved_attributes: list[Any] | None = None  # the attributes to restore

    def enter(self) -> None:
        with suppress(termios.error, OSError):
            if not is_foreground(self._descriptor):
                return  # changing a terminal from the background stops the process
            saved_attributes = termios.tcgetattr(self._descriptor)
            attributes = [*saved_attributes[:_CC], list(saved_attributes[_CC])]
            attributes[_IFLAG] &= ~termios.ICRNL  # Enter stays \r, which the prompt expects
            attributes[_LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            attributes[_LFLAG] |= termios.NOFLSH  # Ctrl-C discards neither keys nor output
            attributes[_CC][termios.VMIN], attributes[_CC][termios.VTIME] = 1, 0
            self._saved_attributes = saved_attributes
            termios.tcsetattr(self._descriptor, termios.TCSANOW, attributes)

    def leave(self) -> None:
        saved_attributes, self._saved_attributes = self._saved_attributes, None
        with suppress(termios.error, OSError):
            if saved_attributes is not None and is_foreground(self._descriptor):
                termios.tcsetattr(self._descriptor, termios.TCSANOW, saved_attributes)

    def suspend(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, suspend, and change it again."""
        self.leave()
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
        global _suspension_count
        _suspension_count += 1
        signal.signal(signal_number, self.suspend)
        self.enter()


def is_foreground(descriptor: int) -> bool:
    """Whether this process may read from a terminal without being stopped. Raises OSError."""
    return os.tcgetpgrp(descriptor) == os.getpgrp()
