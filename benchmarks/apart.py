"""Run a measurement in a new process: memory freed by an earlier one may still be resident."""

import os
import subprocess
import sys
from pathlib import Path

from kvkeep.errors import KvkeepError

REPOSITORY = Path(__file__).parent.parent


def run_in_new_process(module: str, *arguments: str) -> str:
    """Run `python -m module` and return its standard output; standard error is passed through.

    Raises KvkeepError if it fails.
    """
    # Benchmarks are not installed: make them importable from any working directory.
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        raise KvkeepError(f"{module} {' '.join(arguments)} ended with {process.returncode}")
    return process.stdout
