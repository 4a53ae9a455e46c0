"""How many threads this process may compute on.

PyTorch counts the cores that the process may run on. A container is often given all cores of its
machine, and of their time as much as a few: more threads than that are stopped in the middle of a
step, and the others wait for them.
"""

import os
from functools import cache
from pathlib import Path

# Whoever sets one of these has chosen a number.
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NO_LIMIT = ("max", "-1")


def cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float | None:
    """Of how many cores the time is this process', by its control groups; None where it has all.

    The least of its own group's and of those around it. root: of the file system.
    """
    found = [_time(*each) for folder, names in _groups(root) if (each := _read(folder, names))]
    return min((each for each in found if each is not None), default=None)


def usable(root: Path = Path("/")) -> int:
    """Threads that can compute at once: whole cores, so that none is stopped for lack of time."""
    least = quota(root)
    return cores() if least is None else max(1, min(cores(), int(least)))


@cache
def fit_threads(root: Path = Path("/")) -> None:
    """Lets torch compute on no more threads than can run at once: once a process.

    Only fewer than it would by itself, and not where the environment chose a number. Who wants
    another number calls `torch.set_num_threads` after the first model is loaded.
    """
    import torch

    if quota(root) is not None and not any(map(os.environ.get, CHOSEN_BY)):
        torch.set_num_threads(min(torch.get_num_threads(), usable(root)))


_V1, _V2 = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


def _groups(root: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Folders of the process' groups and of those around them, and the files that limit time.

    /proc names a group by its place in the hierarchy. Within a container that place may not be
    mounted, but its files lie where the hierarchy begins.
    """
    mounts, found = root / "sys/fs/cgroup", list[tuple[Path, tuple[str, ...]]]()
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        names: tuple[str, ...] = _V1 if controllers else _V2
        tops = [mounts / (controllers or "unified"), mounts / "cpu" if controllers else mounts]
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = Path(place.strip("/"))
        found += [(top / each, names) for top in tops for each in (inner, *inner.parents)]
    return found


def _read(folder: Path, names: tuple[str, ...]) -> list[str]:
    """The two numbers of a group, as text; empty where it has none."""
    try:
        text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
    except OSError:
        return []
    words = text.split()
    return words if len(words) == 2 else []


def _time(allowed: str, period: str) -> float | None:
    """In cores. Both in microseconds."""
    try:
        return None if allowed in _NO_LIMIT else int(allowed) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
