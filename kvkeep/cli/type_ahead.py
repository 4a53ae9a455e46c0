"""Keys typed while an answer is written: held for the next prompt, and not echoed."""

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kvkeep.runtime.signals import interrupts_deferred

_suspensions: list[None] = []
_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6  # indices in the list of termios.tcgetattr


def suspensions() -> int:
    """Return how often Ctrl-Z suspended this process; the screen may have changed since."""
    return len(_suspensions)


@contextmanager
def type_ahead() -> Iterator[None]:
    """Hold typed keys back without echo during the block, for the prompt after it.

    Ctrl-C, Ctrl-Z and Ctrl-S act at once as usual. Nothing changes if standard input is not a
    terminal, or if this process is in the background.
    """
    mode = _Unechoed(sys.stdin.fileno())
    stops = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
    if stops:
        signal.signal(signal.SIGTSTP, mode.suspend)
    try:
        mode.enter()
        yield
    finally:
        with interrupts_deferred():
            mode.leave()
            if stops:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)


class _Unechoed:
    """A terminal mode without echo and without line editing."""

    def __init__(self, handle: int):
        self._handle = handle
        self._saved: list[Any] | None = None

    def enter(self) -> None:
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(self._handle) != os.getpgrp():
                return  # changing a terminal from the background stops the process
            saved = termios.tcgetattr(self._handle)
            mode = [*saved[:_CHARACTERS], list(saved[_CHARACTERS])]
            mode[_INPUT] &= ~termios.ICRNL
            mode[_LOCAL] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[_LOCAL] |= termios.NOFLSH  # Ctrl-C discards neither typed keys nor pending output
            mode[_CHARACTERS][termios.VMIN], mode[_CHARACTERS][termios.VTIME] = 1, 0
            self._saved = saved
            termios.tcsetattr(self._handle, termios.TCSANOW, mode)

    def leave(self) -> None:
        saved, self._saved = self._saved, None
        with suppress(termios.error, OSError):
            if saved is not None and os.tcgetpgrp(self._handle) == os.getpgrp():
                termios.tcsetattr(self._handle, termios.TCSANOW, saved)

    def suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, suspend, and change it again."""
        self.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        _suspensions.append(None)
        signal.signal(number, self.suspend)
        self.enter()
