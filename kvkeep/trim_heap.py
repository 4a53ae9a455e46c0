"""Memory that the process no longer uses, given back to the system."""

import ctypes
import sys


def trim_heap() -> None:
    """Lets resident memory fall to what is in use, where the C library knows how (glibc's).

    Its allocator otherwise keeps much of what was freed, in case it is needed again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
