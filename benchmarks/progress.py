"""A bar on standard error, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

from tqdm import tqdm


@contextmanager
def bar(total: int, what: str, unit: str = " tokens") -> Iterator[Callable[[int], None]]:
    """Hands out what is to be called with each number of units done."""
    shown: tqdm[Never]
    with tqdm(total=total, desc=what, unit=unit, leave=False, disable=None) as shown:

        def advance(count: int) -> None:
            shown.update(count)

        yield advance
