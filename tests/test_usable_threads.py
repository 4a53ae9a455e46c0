"""Threads are as many as the cores whose time the process may use, by its control groups."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.runtime.cpu import cores, quota, usable

V2, V1 = "0::/user/of\n", "4:cpu,cpuacct:/docker/7f\n3:cpuset:/docker/7f\n0::/\n"


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with such control groups."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(folder: str, allowed: int) -> dict[str, str]:
    top = f"sys/fs/cgroup/{folder}"
    return {f"{top}/cpu.cfs_quota_us": f"{allowed}\n", f"{top}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        (V2, {}, None),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "max 100000\n"}, None),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "150000 100000\n"}, 1.5),
        # A group has no more than what is around it.
        (
            V2,
            {
                "sys/fs/cgroup/user/of/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/user/cpu.max": "100000 50000\n",
            },
            2.0,
        ),
        # Within a container its own group is the top of what is mounted.
        (V2, {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (V1, v1("cpu,cpuacct/docker/7f", 250_000), 2.5),
        (V1, v1("cpu,cpuacct/docker/7f", -1), None),
        (V1, v1("cpu,cpuacct", 300_000), 3.0),
        (V1, v1("cpu", 300_000), 3.0),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "what\n"}, None),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "so much\n"}, None),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "100000 0\n"}, None),
    ],
)
def test_the_least_quota_counts(
    tmp_path: Path, groups: str, files: dict[str, str], wanted: float | None
) -> None:
    root = system(tmp_path, groups, files)
    assert quota(root) == wanted
    most = cores() if wanted is None else max(1, int(wanted))
    assert usable(root) == min(cores(), most)


def test_where_there_are_no_groups_all_cores_are_usable(tmp_path: Path) -> None:
    assert quota(tmp_path) is None
    assert usable(tmp_path) == cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process has all cores here")
def test_cores_are_those_that_the_process_may_run_on() -> None:
    script = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    script += "from kvkeep.runtime.cpu import cores, usable; print(cores(), usable())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.split() == [b"1", b"1"]


FITTED = """
import json, torch
from pathlib import Path
from kvkeep.runtime.cpu import fit_threads
root = Path({root!r})
torch.set_num_threads(16)
fit_threads(root)
fitted = torch.get_num_threads()
torch.set_num_threads(7)
fit_threads(root)
print(json.dumps([fitted, torch.get_num_threads()]))
"""


@pytest.mark.parametrize(
    ("limit", "environment", "wanted"),
    [
        ("150000", {}, 1),
        ("max", {}, 16),
        ("150000", {"OMP_NUM_THREADS": "16"}, 16),
        ("150000", {"MKL_NUM_THREADS": "16"}, 16),
    ],
)
def test_torch_computes_on_no_more_than_have_time_unless_a_number_was_chosen(
    tmp_path: Path, limit: str, environment: dict[str, str], wanted: int
) -> None:
    """Once: what a program sets later stays."""
    root = system(tmp_path, V2, {"sys/fs/cgroup/user/of/cpu.max": f"{limit} 100000"})
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", FITTED.format(root=str(root))],
        env=kept | environment,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == [wanted, 7]
