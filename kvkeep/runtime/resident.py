"""Memory that the process has in RAM."""

import sys
from pathlib import Path


def peak_rss() -> int:
    """The most memory that this process has had in RAM, in bytes."""
    try:
        # Where there is one, since getrusage also counts the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return _peak_rss_elsewhere()


def _peak_rss_elsewhere() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
