"""Ctrl-C at a given step of the model, on any machine.

As a script: `python interrupt_at_step.py STEP ...` is `python -m kvkeep ...`, interrupted there.
"""

import itertools
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F


def interrupting(step: int, signal_number: int = signal.SIGINT) -> Callable[..., Any]:
    """Return a replacement of torch's `embedding`, with which each step of a model begins.

    Its call of that number, counted from 1, raises the signal.
    """
    embedding, number = F.embedding, itertools.count(1)

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(number) == step:
            assert signal.getsignal(signal_number) is not signal.SIG_DFL, "it would end the tests"
            signal.raise_signal(signal_number)
        return embedding(*arguments, **options)

    return counted


if __name__ == "__main__":
    F.embedding = interrupting(int(sys.argv.pop(1)))
    runpy.run_module("kvkeep", run_name="__main__", alter_sys=True)
