"""A grid as one picture: a panel for each task, a line for each method."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvkeep.evaluate.grid import UNCOMPRESSED, Grid, Reading
from kvkeep.evaluate.plot import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stay apart for every kind of colour vision (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "-.", ":")
_SPREAD = 0.5  # octaves over which methods of one ratio stand side by side: all of them are seen


def draw_grid(grid: Grid, suffix: str) -> bytes:
    """The picture as a file's content: the share found over the ratio; dashed: uncompressed.

    Where the text's end is foretold, its perplexity instead.
    """
    from matplotlib.figure import Figure

    tasks = grid.tasks
    figure = Figure(figsize=(3.2 * len(tasks) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        _draw_task(axes, grid, task)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return picture(figure, suffix)


def _draw_task(axes: "Axes", grid: Grid, task: str) -> None:
    for index, method in enumerate(grid.methods):
        found = {ratio: grid.of(task, method, ratio) for ratio in grid.ratios}
        ratios = [ratio for ratio, readings in found.items() if readings]
        heights = [_height(found[ratio]) for ratio in ratios]
        beside = 2 ** (_SPREAD * ((index + 0.5) / len(grid.methods) - 0.5))
        again = index // len(COLOURS)  # how often all colours were used before
        axes.plot(
            *([ratio * beside for ratio in ratios], heights),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[(index + again) % len(MARKERS)],
            ls=STYLES[again % len(STYLES)],
            ms=5,
            lw=1.5,
            alpha=0.85,
            label=method,
        )
    whole = grid.of(task, UNCOMPRESSED, 1)
    if whole:
        axes.axhline(_height(whole), color="black", ls="--", lw=1, label=UNCOMPRESSED)
    if any(each.of.task == task and each.found is None for each in grid.readings.values()):
        axes.set_ylabel("perplexity")
    else:
        axes.set_ylabel("found")
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(grid.ratios, [f"{ratio:g}" for ratio in grid.ratios])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{task}, samples: {len(whole)}", loc="left", fontsize="medium")
    axes.set_xlabel("times fewer cells")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _height(readings: Sequence[Reading]) -> float:
    """The share found, or the perplexity of what was foretold."""
    if readings[0].found is None:
        return math.exp(-fmean(each.log_probability for each in readings))
    return fmean(bool(each.found) for each in readings)
