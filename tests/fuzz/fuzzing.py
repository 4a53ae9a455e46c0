"""Run a reader on many damaged inputs: it must succeed or raise a typed error, in bounded time."""

import faulthandler
import os
import resource
from collections import Counter
from collections.abc import Callable
from random import Random

import psutil

from kvkeep.errors import KvkeepError

# The number of inputs of each format, and that of the first. `make fuzz` sets them.
COUNT = int(os.environ.get("KVKEEP_FUZZ", "0"))
FIRST = int(os.environ.get("KVKEEP_FUZZ_FIRST", "0"))
DEFAULT_COUNT = 50
_TIMEOUT_SECONDS = 120  # for one input, which normally takes milliseconds
_MEMORY_BYTES = 6 << 30  # of address space beyond the current use


def fuzz(read: Callable[[Random], object], seed: int, share: int = 1) -> Counter[str]:
    """Call `read` many times, each time with a new generator whose seed an error message names.

    read: damages an input with the generator and reads it. share: the number of tests that split
    the inputs of the format among them.
    Returns how often each typed error was raised, and under "read" how often none was.
    Raises AssertionError at any other exception.
    """
    outcomes: Counter[str] = Counter()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _MEMORY_BYTES, hard)
    )
    try:
        first = FIRST // share
        for number in range(first, first + (COUNT // share or DEFAULT_COUNT)):
            faulthandler.dump_traceback_later(_TIMEOUT_SECONDS, exit=True)
            try:
                read(Random(seed * 10_000_000 + number))
                outcomes["read"] += 1
            except KvkeepError as error:
                outcomes[type(error).__name__] += 1
            except BaseException as error:
                raise AssertionError(
                    f"input {number} of seed {seed}: {type(error).__name__}: {error}"
                ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return outcomes
