"""A measurement in a process of its own: memory that an earlier one has freed may still be held."""

import os
import subprocess
import sys
from pathlib import Path

from kvkeep.errors import KvkeepError

CLONE = Path(__file__).parent.parent


def run_apart(module: str, *arguments: str) -> str:
    """What `python -m module` wrote to standard output; what it said went to standard error.

    Raises KvkeepError if it fails.
    """
    # Wherever this process was started: benchmarks are not installed.
    path = os.pathsep.join(filter(None, (str(CLONE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KvkeepError(f"{module} {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout
