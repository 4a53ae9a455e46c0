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


def interrupting(step: int, signal_number: int = signal.SIGINT) -> Callable[..., Any]:
    """What stands in for torch's `embedding`, which each step of a model begins with: with the
    call of that number, from 1, comes the signal.
    """
    embedding, number = F.embedding, itertools.count(1)

    def counted(*given: Any, **options: Any) -> Any:
        if next(number) == step:
            assert signal.getsignal(signal_number) is not signal.SIG_DFL, "it would end the tests"
            signal.raise_signal(signal_number)
        return embedding(*given, **options)

    return counted


if __name__ == "__main__":
    F.embedding = interrupting(int(sys.argv.pop(1)))
    runpy.run_module("kvkeep", run_name="__main__", alter_sys=True)
