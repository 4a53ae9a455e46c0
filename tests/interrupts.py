"""Breaking a call off at any of the lines of kvkeep that it runs."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvkeep
from kvkeep.runtime import signals, worker

_PACKAGE = str(Path(kvkeep.__file__).parent)

# Python tells of the line of a `with` once more before it calls `__exit__`. What is thrown there
# leaves the lock taken for good, and other threads' tests wait for ever; no signal is seen there.
_LOCKING = ("run_in_turn", "run_in_caller")


class BrokenOff(BaseException):
    """What is thrown into a line: as little expected as running out of memory is."""


@contextmanager
def at_each_line(act: Callable[[int], None], spared: tuple[str, ...] = ()) -> Iterator[list[int]]:
    """Calls `act` before each line of kvkeep that the block runs, with the line's number in order.

    Lines in files and functions that are `spared` do not count. Yields a list of their number.
    """
    count = [0]

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            count[0] += 1
            act(count[0] - 1)
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        counts = file.startswith(_PACKAGE) and file not in spared and function not in spared
        return line if counts else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield count
    finally:
        sys.settrace(before)


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of kvkeep a call runs."""
    with at_each_line(lambda index: None, (signals.__file__, *_LOCKING)) as count:
        call()
    return count[0]


def broken_off_at(index: int, call: Callable[[], object]) -> bool:
    """Runs a call that fails before its line `index`; whether it got that far.

    Nothing fails in the few lines that hold signals back: they allocate nothing to speak of.
    """

    def act(now: int) -> None:
        if now == index:
            raise BrokenOff

    try:
        with at_each_line(act, (signals.__file__, *_LOCKING)):
            call()
    except BrokenOff:
        return True
    finally:
        require_let_go()
    return False


def interrupted_from(index: int, call: Callable[[], object]) -> bool:
    """Runs a call and sends Ctrl-C before its line `index` and before each one after it.

    Whether one got through. The lines that hold signals back count, too.
    """

    def act(now: int) -> None:
        if now >= index:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with at_each_line(act, _LOCKING):
            call()
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGINT, before)
        require_let_go()
    return False


def require_let_go() -> None:
    """Others can compute."""
    assert not worker._worker.holds_lock, "what was broken off has left the lock taken"
