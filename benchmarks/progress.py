"""Progress bar on standard error, if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

from tqdm import tqdm


@contextmanager
def bar(total: int, what: str, unit: str = " tokens") -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yields the function that advances it by a number of units."""
    shown: tqdm[Never]
    with tqdm(total=total, desc=what, unit=unit, leave=False, disable=None) as shown:

        def advance(count: int) -> None:
            shown.update(count)

        yield advance
