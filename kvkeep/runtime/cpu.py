"""The number of threads that this process can compute on.

PyTorch counts the cores that the process may run on. A container is often given all cores of its
host, and a CPU quota of a few: more threads than that are stopped in the middle of a step, and the
others wait for them.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Environment variables by which a user sets the number of threads.
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NO_LIMIT = ("max", "-1")
_V1_FILES, _V2_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


def cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float | None:
    """Return the cgroup CPU quota in cores, or None.

    The least of the process's own group and of its parents. root: of the file system.
    """
    return min(_quotas(root), default=None)


def usable(root: Path = Path("/")) -> int:
    """Return the threads that can compute at once: whole cores within the quota, at least one."""
    limit = quota(root)
    return cores() if limit is None else max(1, min(cores(), int(limit)))


@cache
def fit_threads(root: Path = Path("/")) -> None:
    """Limit torch to as many threads as can run at once; once in a process.

    It only lowers torch's own number, and does nothing if the environment sets one. To use another
    number, call `torch.set_num_threads` after the first model is loaded.
    """
    import torch

    if quota(root) is not None and not any(map(os.environ.get, CHOSEN_BY)):
        torch.set_num_threads(min(torch.get_num_threads(), usable(root)))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of the process's control groups and of their parents."""
    for folder, names in _group_folders(root):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
            microseconds, period = text.split()
            if microseconds not in _NO_LIMIT:
                yield int(microseconds) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # it has no limit, or none that can be read


def _group_folders(root: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the folders of the process's groups and their parents, and the files that limit CPU.

    /proc names a group by its path in the hierarchy. Within a container that path may not be
    mounted, but the group's files lie where the hierarchy begins.
    """
    mounts, folders = root / "sys/fs/cgroup", list[tuple[Path, tuple[str, ...]]]()
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names: tuple[str, ...] = _V1_FILES if controllers else _V2_FILES
        tops = [mounts / (controllers or "unified"), mounts / "cpu" if controllers else mounts]
        group = Path(path.strip("/"))
        folders += [(top / part, names) for top in tops for part in (group, *group.parents)]
    return folders
