"""Many damaged inputs through one reader: a typed error, or the right thing, in bounded time."""

import faulthandler
import os
import resource
from collections import Counter
from collections.abc import Callable
from random import Random

import psutil

from kvkeep.errors import KvkeepError

# Of each kind of damage to each format. `make fuzz` sets it to 100,000 a format.
COUNT = int(os.environ.get("KVKEEP_FUZZ", "0"))
FEW = 150
_SECONDS = 120  # for one input; thousands of times what one takes
_BYTES = 6 << 30  # of address space beyond what is taken already


def fuzz(read: Callable[[Random], object], seed: int, share: int = 1) -> Counter[str]:
    """Calls `read` many times, each time with a generator of its own, by whose seed it is found.

    read: damages an input and reads it. share: kinds of damage that the format's inputs go to.
    Returns how often which typed error came, and "read" where none did.
    """
    found: Counter[str] = Counter()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _BYTES, hard))
    try:
        for number in range(COUNT // share or FEW):
            faulthandler.dump_traceback_later(_SECONDS, exit=True)
            try:
                read(Random(seed * 10_000_000 + number))
                found["read"] += 1
            except KvkeepError as error:
                found[type(error).__name__] += 1
            except BaseException as error:
                raise AssertionError(
                    f"input {number} of seed {seed}: {type(error).__name__}: {error}"
                ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return found
