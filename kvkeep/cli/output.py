"""Messages on standard error, and counts and sizes as messages show them."""

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


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def megabytes(count: int) -> str:
    size = count / 1e6
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.1f} MB"


def shown_bytes(count: int) -> str:
    """A size as options take it, rounded up: "195MB", "1.5GB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            tenths = -(-count * 10 // size)
            return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{unit}"
    return f"{-(-count // 1000)}KB"
