"""A simulated full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files_only(size: int = 9000) -> Iterator[None]:
    """Limit the size of files that this process can write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
