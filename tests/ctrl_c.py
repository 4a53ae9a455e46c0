"""Ctrl-C at a step of the model, on a fast machine as on a slow one.

As a script: `python ctrl_c.py STEP ...` is `python -m kvkeep ...`, interrupted there.
"""

import itertools
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F


def interrupting(step: int) -> Callable[..., Any]:
    """What stands in for torch's `embedding`, which each step of a model begins with: with the
    call of that number, from 1, comes the signal that Ctrl-C sends.
    """
    embedding, number = F.embedding, itertools.count(1)

    def counted(*given: Any, **options: Any) -> Any:
        if next(number) == step:
            signal.raise_signal(signal.SIGINT)
        return embedding(*given, **options)

    return counted


if __name__ == "__main__":
    F.embedding = interrupting(int(sys.argv.pop(1)))
    runpy.run_module("kvkeep", run_name="__main__", alter_sys=True)
