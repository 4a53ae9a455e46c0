"""How fast memory is read here: what a token of a large model mostly waits for."""

import time

import psutil
import torch

_SECONDS = 0.5  # that are measured
_LEAST, _MOST = 32 << 20, 1 << 30  # bytes


def size_to_read(wanted: int) -> int:
    """Bytes: as many as wanted, within what tells something and what memory has room for."""
    room = psutil.virtual_memory().available // 4
    return max(_LEAST, min(wanted, _MOST, room)) // 4 * 4


def bytes_per_second(size: int) -> float:
    """The fastest pass of half a second of passes over so many bytes, by all threads of torch."""
    numbers = torch.ones(size // 4, dtype=torch.float32, device="cpu")
    fastest, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < _SECONDS:
        before = time.perf_counter()
        numbers.sum()
        fastest = max(fastest, numbers.nbytes / (time.perf_counter() - before))
    return fastest
