"""What a command says to the person, on standard error: heard or not, the work goes on."""

import os
import sys
from typing import TextIO


def say(text: str, end: str = "\n") -> None:
    """Writes to standard error. Where nobody listens any more, that is no reason to stop."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """What a stream still holds goes nowhere, or Python would complain of it as it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
