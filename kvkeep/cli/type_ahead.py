"""Keys typed while a program writes: kept for the next prompt, and not echoed into the output."""

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
_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6  # of the list that termios gives


def suspensions() -> int:
    """How often this process was suspended by Ctrl-Z: the screen may show anything since."""
    return len(_suspensions)


@contextmanager
def type_ahead() -> Iterator[None]:
    """Hold keys back, unechoed, for what reads the terminal key by key after the block.

    Ctrl-C, Ctrl-Z and Ctrl-S act at once as always. Nothing changes where standard input is no
    terminal, or this process is in the background of one.
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
    """The mode of a terminal in which it neither echoes keys nor edits a line of them."""

    def __init__(self, handle: int):
        self._handle = handle
        self._usual: list[Any] | None = None

    def enter(self) -> None:
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(self._handle) != os.getpgrp():
                return  # changing a terminal from the background stops the process
            usual = termios.tcgetattr(self._handle)
            mode = [*usual[:_CHARACTERS], list(usual[_CHARACTERS])]
            mode[_INPUT] &= ~termios.ICRNL
            mode[_LOCAL] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[_LOCAL] |= termios.NOFLSH  # Ctrl-C drops no key, and nothing that is being shown
            mode[_CHARACTERS][termios.VMIN], mode[_CHARACTERS][termios.VTIME] = 1, 0
            self._usual = usual
            termios.tcsetattr(self._handle, termios.TCSANOW, mode)

    def leave(self) -> None:
        usual, self._usual = self._usual, None
        with suppress(termios.error, OSError):
            if usual is not None and os.tcgetpgrp(self._handle) == os.getpgrp():
                termios.tcsetattr(self._handle, termios.TCSANOW, usual)

    def suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets the terminal as it was, and it is changed again afterwards."""
        self.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        _suspensions.append(None)
        signal.signal(number, self.suspend)
        self.enter()
