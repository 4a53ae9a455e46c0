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
    """Return a Markdown table for each task, with a row for each method and a column for each
    ratio.

    For questions: the share of samples answered, of all and of those that the uncompressed model
    answers, and in brackets the mean log-probability of a token of the answer. For continuations:
    the perplexity, and its increase over the uncompressed cache. The head has the size of keys and
    values at each ratio, a range if it differs between methods.
    """
    return "\n\n".join(_task(grid, task) for task in grid.tasks)


def filled(path: Path, grid: Grid | None) -> bytes:
    """Return a page with the tables between its markers.

    grid: None to check only that there are markers. Raises InvalidArgument if there are none.
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
    """The mean size of keys and values in MB; a range if methods differ by more than 1%."""
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
    """The figures of one field of a table. whole: the uncompressed model's results."""
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
    """The sample of its task: seed and index."""
    return reading.of.seed, reading.of.sample
