"""Where the `kvkeep` command starts: what must hold before anything takes time to import."""

import gc
import os
import signal
import sys
from types import FrameType

# Objects made before the collector looks for cycles among the young. Importing torch makes a
# million that stay: at 700, as Python has it, that is a quarter of a second of looking for nothing.
_COLLECTED_EVERY = 100_000
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run() -> None:
    """Runs the command line.

    Ctrl-C while modules are imported ends the process there, with the status that it has later.
    """
    watched = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if watched:
        signal.signal(signal.SIGINT, _interrupt)
    gc.set_threshold(_COLLECTED_EVERY)
    try:
        open_streams()
        from kvkeep.cli.main import main

        main(prog_name="kvkeep")
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    finally:
        if watched:  # what is left is for Python to clean up, and no more to be told of
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The process gives its memory back as a whole. That nothing among a million objects of
        # torch is garbage would be looked at twice before, for half a second.
        gc.freeze()


def open_streams() -> None:
    """Gives standard streams that were closed (`>&-`) an end that takes all and holds nothing.

    Otherwise the first files to be opened would be taken for them, by number.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        free = _is_free(number)
        if free:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            where = number if free else os.devnull
            setattr(sys, name, open(where, mode, encoding="utf-8"))  # noqa: SIM115


def _is_free(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """In the middle of an import an exception could be swallowed, or taken for a failed import.

    Once torch is there, whatever else is imported is small, and there may be work to be saved.
    """
    if not _torch_is_there() and _importing(frame):
        os._exit(128 + number)
    signal.default_int_handler(number, frame)


def _torch_is_there() -> bool:
    specification = getattr(sys.modules.get("torch"), "__spec__", None)
    return specification is not None and not getattr(specification, "_initializing", False)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
