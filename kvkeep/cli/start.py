"""Entry point of the `kvkeep` command: process setup before the slow imports."""

import gc
import os
import signal
import sys
from types import FrameType

# Allocations between two collections of the youngest generation. Importing torch creates a million
# objects that stay. Python's default of 700 would spend a quarter of a second on them.
_GC_THRESHOLD = 100_000
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run() -> None:
    """Run the command line. Ctrl-C during imports ends the process at once."""
    handles_sigint = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_sigint:
        signal.signal(signal.SIGINT, _interrupt)
    gc.set_threshold(_GC_THRESHOLD)
    try:
        _open_closed_streams()
        from kvkeep.cli.main import main

        main(prog_name="kvkeep")
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    finally:
        if handles_sigint:  # only Python's own cleanup is left: end without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Or Python would scan torch's million objects for garbage before exiting: half a second.
        gc.freeze()


def _open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) as the null device, or a file would get descriptor 1."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
            is_closed = False
        except OSError:
            is_closed = True
            null_descriptor = os.open(os.devnull, os.O_RDWR)
            if null_descriptor != descriptor:
                os.dup2(null_descriptor, descriptor)
                os.close(null_descriptor)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            file = descriptor if is_closed else os.devnull
            setattr(sys, name, open(file, mode, encoding="utf-8"))  # noqa: SIM115


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Handle SIGINT: exit at once during an import, else raise KeyboardInterrupt.

    An exception during an import could be swallowed. Once torch is imported, the remaining imports
    are short, and there may be work to save.
    """
    if not _torch_is_imported() and _is_importing(frame):
        os._exit(128 + signal_number)
    signal.default_int_handler(signal_number, frame)


def _torch_is_imported() -> bool:
    module_spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return module_spec is not None and not getattr(module_spec, "_initializing", False)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a stack frame or one of its callers belongs to Python's import system."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
