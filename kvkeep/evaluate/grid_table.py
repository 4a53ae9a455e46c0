"""A grid as Markdown tables, one for each task."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.grid import UNCOMPRESSED, Grid, Reading
from kvkeep.evaluate.markdown import has_place, piped, put

BEGIN = "<!-- grid -->"
END = "<!-- /grid -->"
NOTHING = "–"


def grid_markdown(grid: Grid) -> str:
    """For each task the share found, of all samples and of those that the uncompressed model finds,
    and, in brackets, the log-probability of a token of the key. Where the text's end is foretold,
    its perplexity, and how much more that is than from the whole memory.

    The head says what keys and values take at each ratio: all methods get as much.
    """
    return "\n\n".join(_task(grid, task) for task in grid.tasks)


def filled(path: Path, grid: Grid | None) -> bytes:
    """The page with the tables in the place of what lies between its markers.

    grid: None to see only whether it has markers. Raises InvalidArgument where it has none.
    """
    page = path.read_text(encoding="utf-8")
    if not has_place(page, BEGIN, END):
        raise InvalidArgument(f"{path} has no lines {BEGIN} and {END} to write between")
    return (page if grid is None else put(page, BEGIN, END, grid_markdown(grid))).encode()


def _task(grid: Grid, task: str) -> str:
    whole = grid.of(task, UNCOMPRESSED, 1)
    head = [task, *(f"{ratio:g}×, {_size(grid, task, ratio)}" for ratio in grid.ratios)]
    rows = [[m, *(_figure(grid.of(task, m, r), whole) for r in grid.ratios)] for m in grid.methods]
    below = f"Uncompressed: {_figure(whole)}, {_megabytes(whole)}. Samples: {len(whole)}."
    return f"{piped([head, *rows])}\n\n{below}"


def _size(grid: Grid, task: str, ratio: float) -> str:
    return _megabytes([each for m in grid.methods for each in grid.of(task, m, ratio)])


def _megabytes(readings: Sequence[Reading]) -> str:
    """Of the readings' mean; of the least and the most where methods differ by more than 1%."""
    if not readings:
        return NOTHING
    means: dict[str, list[int]] = {}
    for each in readings:
        means.setdefault(each.of.method, []).append(each.nbytes)
    sizes = sorted(fmean(sizes) / 1e6 for sizes in means.values())
    if sizes[-1] > sizes[0] * 1.01:
        return f"{sizes[0]:.1f}–{sizes[-1]:.1f} MB"
    return f"{fmean(sizes):.1f} MB"


def _figure(readings: Sequence[Reading], whole: Sequence[Reading] = ()) -> str:
    """whole: what the uncompressed model makes of them."""
    if not readings:
        return NOTHING
    if readings[0].found is None:
        return _perplexity(readings, whole)
    known = {_text(each) for each in whole if each.found}
    share = fmean(bool(each.found) for each in readings)
    likely = fmean(each.log_probability for each in readings)
    again = [bool(each.found) for each in readings if _text(each) in known]
    of_known = f" / {fmean(again):.0%}" if again else ""
    return f"{share:.0%}{of_known} ({likely:.2f})".replace("-", "−")


def _perplexity(readings: Sequence[Reading], whole: Sequence[Reading]) -> str:
    likely = fmean(each.log_probability for each in readings)
    same = {_text(each) for each in readings}
    before = [each.log_probability for each in whole if _text(each) in same]
    more = f" ({math.exp(fmean(before) - likely) - 1:+.1%})" if before else ""
    return f"{math.exp(-likely):.2f}{more}".replace("-", "−")


def _text(reading: Reading) -> tuple[int, int]:
    """Which text of its task it is of."""
    return reading.of.seed, reading.of.sample
