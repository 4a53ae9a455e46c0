"""Measure an installation: seconds, disk size and packages: `make install-size`.

Installs this clone into a new virtual environment, step by step and without pip's cache, under the
releases of constraints.txt. Prints a table; each line includes the ones before it.
"""

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from wheels import ROOT, torch_release

STEPS = {
    "PyTorch": [f"torch=={torch_release()}"],
    "kvkeep": ["."],
    "kvkeep[server]": ["kvkeep[server]"],  # adds to the installed kvkeep
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvkeep-size-") as name:
        folder = Path(name)
        venv.create(folder, with_pip=True)
        print("| | seconds | MB on disk | packages |\n|---|---:|---:|---:|")
        seconds = 0.0
        for step, requirements in STEPS.items():
            seconds += install(folder, requirements)
            packages = installed_packages(folder)
            megabytes = disk_bytes(folder) / 1e6
            print(f"| {step} | {seconds:.0f} | {megabytes:,.0f} | {len(packages)} |", flush=True)
    if gpu := sum(package.startswith(("nvidia", "cuda")) for package in packages):
        sys.exit(f"{gpu} packages are CUDA libraries: see PyTorch's build in docs/install.md")


def install(folder: Path, requirements: list[str]) -> float:
    """Install requirements into an environment; return the seconds that it took."""
    options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    start = time.perf_counter()
    subprocess.run(
        [folder / "bin" / "pip", "install", *options, *constraint, *requirements],
        cwd=ROOT,
        check=True,
    )
    return time.perf_counter() - start


def installed_packages(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("lib/python*/site-packages/*.dist-info"))


def disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


if __name__ == "__main__":
    main()
