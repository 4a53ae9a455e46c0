"""The number of threads that this process can compute on.

PyTorch counts the cores that the process may run on. A container often may run on all cores of its
host, with a CPU quota of a few. More threads than the quota are stopped in the middle of a step,
and the others wait for them.
"""

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Environment variables by which a user sets the number of threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NO_LIMIT = ("max", "-1")
_V1_FILES, _V2_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the least cgroup CPU quota of the process's groups and their parents, in cores."""
    return min(_cpu_quotas(root), default=None)


def usable_threads(root: Path = Path("/")) -> int:
    """Return how many threads can compute at once: whole cores within the quota, at least one."""
    quota = cpu_quota(root)
    return num_cores() if quota is None else max(1, min(num_cores(), int(quota)))


@cache
def limit_torch_threads(root: Path = Path("/")) -> None:
    """Lower torch's number of threads to what can run at once; once in a process.

    The quota does not count if the environment sets a number. OMP_THREAD_LIMIT always does: OpenMP
    starts no more threads, and torch's bfloat16 products are wrong with fewer than it expects. To
    use another number, call `torch.set_num_threads` after the first model is loaded.
    """
    import torch

    threads = torch.get_num_threads()
    most = min(threads, _openmp_limit() or threads)
    if cpu_quota(root) is not None and not any(map(os.environ.get, THREAD_VARIABLES)):
        most = min(most, usable_threads(root))
    if most < threads:
        torch.set_num_threads(most)


def require_full_teams() -> None:
    """Make OpenMP start as many threads as are expected, whenever the calling thread computes.

    With OMP_DYNAMIC=true it starts fewer on a busy machine, and with OMP_MAX_ACTIVE_LEVELS=0 none
    beside the calling one. Then torch's bfloat16 products are wrong. Both are settings of each
    thread.
    """
    openmp = _openmp()
    if openmp is None:
        return
    openmp.omp_set_dynamic(0)
    if openmp.omp_get_max_active_levels() == 0:
        openmp.omp_set_max_active_levels(1)


def compute_in_one_thread() -> None:
    """Let PyTorch's operations of the calling thread use no other threads.

    For threads that compute side by side. `torch.set_num_threads` would change all later threads.
    """
    import torch

    openmp = _openmp()
    if openmp is None:
        return
    torch.get_num_threads()  # torch sets this thread's number when it needs it first
    openmp.omp_set_num_threads(1)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime of this process; None without one."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "omp_set_dynamic") else None


def _openmp_limit() -> int | None:
    """Return the most threads that OpenMP starts; None without a limit."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    return int(limit) or None if limit.isdecimal() else None


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder, file_names in _cgroup_folders(root):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in file_names)
            quota_us, period_us = text.split()  # in microseconds
            if quota_us not in _NO_LIMIT:
                yield int(quota_us) / int(period_us)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # it has no limit, or none that can be read


def _cgroup_folders(root: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the folders of the process's groups and their parents, with their CPU quota files.

    /proc names a group by its path in the hierarchy. In a container that path may not be mounted,
    but then the group's files are at the top of the hierarchy.
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
        file_names: tuple[str, ...] = _V1_FILES if controllers else _V2_FILES
        tops = [mounts / (controllers or "unified"), mounts / "cpu" if controllers else mounts]
        group = Path(path.strip("/"))
        folders += [(top / part, file_names) for top in tops for part in (group, *group.parents)]
    return folders
