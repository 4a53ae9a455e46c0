"""The number of threads follows the cgroup CPU quota of the process, and calls end with fewer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from timeouts import PATIENCE

from kvkeep.compiled.binding import kernel_library
from kvkeep.runtime.cpu import cpu_quota, num_cores, usable_threads

V2, V1 = "0::/user/of\n", "4:cpu,cpuacct:/docker/7f\n3:cpuset:/docker/7f\n0::/\n"


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a file system with these control groups."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(folder: str, allowed: int) -> dict[str, str]:
    top = f"sys/fs/cgroup/{folder}"
    return {f"{top}/cpu.cfs_quota_us": f"{allowed}\n", f"{top}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {}, None),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "max 100000\n"}, None),
        (V2, {"sys/fs/cgroup/user/of/cpu.max": "150000 100000\n"}, 1.5),
        # The quota of a parent group binds, too.
        (
            V2,
            {
                "sys/fs/cgroup/user/of/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/user/cpu.max": "100000 50000\n",
            },
            2.0,
        ),
        # In a container its own group is the top of the mounted hierarchy.
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
def test_the_smallest_quota_applies(
    tmp_path: Path, groups: str, files: dict[str, str], expected: float | None
) -> None:
    root = system(tmp_path, groups, files)
    assert cpu_quota(root) == expected
    most = num_cores() if expected is None else max(1, int(expected))
    assert usable_threads(root) == min(num_cores(), most)


def test_without_control_groups_all_cores_are_usable(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert usable_threads(tmp_path) == num_cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process has all cores here")
def test_cores_are_those_that_the_process_may_run_on() -> None:
    script = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    script += "from kvkeep.runtime.cpu import num_cores, usable_threads\n"
    script += "print(num_cores(), usable_threads())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.split() == [b"1", b"1"]


FITTED = """
import json, torch
from pathlib import Path
from kvkeep.runtime.cpu import limit_torch_threads
root = Path({root!r})
torch.set_num_threads(16)
limit_torch_threads(root)
fitted = torch.get_num_threads()
torch.set_num_threads(7)
limit_torch_threads(root)
print(json.dumps([fitted, torch.get_num_threads()]))
"""


@pytest.mark.parametrize(
    ("limit", "environment", "expected"),
    [
        ("150000", {}, 1),
        ("max", {}, 16),
        ("150000", {"OMP_NUM_THREADS": "16"}, 16),
        ("150000", {"MKL_NUM_THREADS": "16"}, 16),
        ("max", {"OMP_THREAD_LIMIT": "3"}, 3),
        ("max", {"OMP_THREAD_LIMIT": "40"}, 16),
        ("150000", {"OMP_THREAD_LIMIT": "3", "OMP_NUM_THREADS": "16"}, 3),
    ],
)
def test_torch_is_limited_to_the_quota_unless_a_number_was_chosen(
    tmp_path: Path, limit: str, environment: dict[str, str], expected: int
) -> None:
    """Once: a number that the program sets later stays."""
    root = system(tmp_path, V2, {"sys/fs/cgroup/user/of/cpu.max": f"{limit} 100000"})
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
    others = {k: v for k, v in os.environ.items() if k not in variables}
    done = subprocess.run(
        [sys.executable, "-c", FITTED.format(root=str(root))],
        env=others | environment,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == [expected, 7]


DYNAMIC_TEAMS = """
import ctypes
from kvkeep.runtime.worker import computes_in_caller, computes_in_worker, hosting

openmp = ctypes.CDLL(None)

def settings():
    return f"{openmp.omp_get_dynamic()},{openmp.omp_get_max_active_levels()}"

if hasattr(openmp, "omp_get_dynamic"):
    assert settings() == "1,0"
    print(computes_in_worker(settings)(), computes_in_caller(settings)())
    openmp.omp_set_dynamic(1)
    openmp.omp_set_max_active_levels(0)
    with hosting(lambda call: None):
        print(computes_in_worker(settings)())
"""


def test_openmp_starts_all_threads_that_a_computation_expects() -> None:
    """With fewer, torch's bfloat16 products are wrong."""
    done = subprocess.run(
        [sys.executable, "-c", DYNAMIC_TEAMS],
        env={**os.environ, "OMP_DYNAMIC": "true", "OMP_MAX_ACTIVE_LEVELS": "0"},
        capture_output=True,
        check=True,
    )
    assert set(done.stdout.split()) <= {b"0,1"}


ALL_CALLS = """
import torch
from compiled.test_products import inputs, make_matrix, many_rows, product
from compiled.test_prompt_attention import attend, prompt
from compiled.test_states import fed, mixer_and_projections
from kvkeep.compression.methods.similarity import most_similar
from packed_model import packed_model, spec_of, spec_with_states

one, x, given = make_matrix("Q4_K", (264, 512)), inputs(40, 512), prompt(46, 6, 3, 64)
mixer, projections = mixer_and_projections("mamba2", 70)
sessions = [fed(packed_model(spec, 4)) for spec in (spec_of(), spec_with_states("delta_net"))]

def results(threads):
    states = {}
    torch.set_num_threads(threads)
    yield product(one.matrix(), x, threads)
    yield many_rows(one.matrix(), x, threads)
    yield one.linear().dense()
    yield from attend(given, threads)
    yield mixer(0, projections, {}, states)
    yield from states.values()
    yield from most_similar(given.keys[None], given.values[None])
    for session in sessions:
        fork = session.fork()
        fork.next_token()
        yield fork.logits

for alone, expected in zip(results(2), results(1), strict=True):
    assert torch.equal(alone, expected)
"""


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
@pytest.mark.extended
def test_calls_end_where_openmp_starts_fewer_threads() -> None:
    """By every entry of a library: its threads may not wait for those that do not exist."""
    tests = Path(__file__).parent
    limit = {"OMP_THREAD_LIMIT": "1", "PYTHONPATH": f"{tests}:{tests.parent}"}
    command = [sys.executable, "-c", ALL_CALLS]
    subprocess.run(command, env={**os.environ, **limit}, check=True, timeout=PATIENCE)
