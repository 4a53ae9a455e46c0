"""Values of options that say how memory is compressed."""

import math
from collections.abc import Callable

import click

# Written out, because the modules that define them import torch, and help must open at once.
METHOD_NAMES = (
    "fitted",
    "random",
    "knorm",
    "keydiff",
    "expected_attention",
    "snapkv",
    "h2o",
    "tova",
    "average",
    "sum",
    "pick_heads",
)
BEST = METHOD_NAMES[0]


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A type for options: a number in a range."""

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            raise click.BadParameter(f"expected a number, found {value!r}") from None
        if not least <= found <= most or math.isinf(found):
            end = "or more" if math.isinf(most) else f"to {most:g}"
            raise click.BadParameter(f"expected {least:g} {end}, found {value}")
        return found

    return read


def ratio(value: str) -> float:
    """A type for options: by how much to compress."""
    found = number(1)(value)
    if found == 1:
        raise click.BadParameter(f"expected more than 1, found {value}")
    return found
