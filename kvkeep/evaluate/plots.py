"""Plots of perplexity over tokens, recall over depth, and grids over compression ratios."""

import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvkeep.evaluate.grid import Grid, GridResult
    from kvkeep.evaluate.perplexity import PerplexityPoint
    from kvkeep.evaluate.recall import RecallResult

FORMATS = (".png", ".svg", ".pdf")
MAX_DEPTHS = 11  # more depths are grouped into tenths of the text

# Colours that can be told apart with every kind of colour vision (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "-.", ":")
METHOD_SPREAD_OCTAVES = 0.5  # the methods of one ratio lie side by side within it


def check_plottable(path: Path) -> None:
    """Raise InvalidArgument if `path` is unsuitable for a plot, or matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidArgument(
            f"a plot must end in one of {', '.join(FORMATS)}; found {path.name!r}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("a plot needs matplotlib: pip install 'kvkeep[plot]'")
    check_writable(path)


def draw_perplexity(points: Sequence["PerplexityPoint"], title: str, suffix: str) -> bytes:
    """Return an image file: perplexity above, memory below, over tokens."""
    from matplotlib.figure import Figure

    from kvkeep.evaluate.perplexity import RECENT_TOKENS

    figure = Figure(figsize=(8, 6), layout="constrained")
    perplexity_axes, memory_axes = figure.subplots(2, 1, sharex=True)
    tokens = [point.tokens for point in points]
    dashed_style = {"marker": "s", "ms": 4, "ls": "--", "mfc": "none"}
    figure.suptitle(title)
    perplexities, recent = [p.perplexity for p in points], [p.recent for p in points]
    perplexity_axes.plot(tokens, perplexities, marker="o", ms=4, label="all scored tokens")
    if recent != perplexities:  # equal for a text of at most RECENT_TOKENS tokens
        perplexity_axes.plot(tokens, recent, label=f"last {RECENT_TOKENS}", **dashed_style)
    perplexity_axes.set(ylabel="perplexity", xlim=(0, tokens[-1] * 1.02))
    perplexity_axes.legend()
    perplexity_axes.grid(alpha=0.3)
    megabytes, cells = [p.kv_bytes / 1e6 for p in points], [p.kv_cells for p in points]
    memory_axes.plot(tokens, megabytes, color="C2", marker="o", ms=4, label="memory (MB)")
    size_limit = 1.08 * max(*megabytes, 1e-6)
    memory_axes.set(xlabel="tokens", ylabel="keys and values (MB)", ylim=(0, size_limit))
    memory_axes.grid(alpha=0.3)
    cell_axes = memory_axes.twinx()
    cell_axes.plot(tokens, cells, color="C3", label="cells", **dashed_style)
    # The other limit keeps the curves apart, which would cover each other.
    cell_axes.set(ylabel="cells", ylim=(0, 1.25 * max(*cells, 1)))
    memory_axes.legend(handles=[*memory_axes.lines, *cell_axes.lines], loc="lower right")
    return _render(figure, suffix)


def draw_recall(results: Sequence["RecallResult"], title: str, suffix: str) -> bytes:
    """Return an image file: the share of samples found over depth, compressed and uncompressed."""
    from matplotlib.figure import Figure

    groups = group_by_depth(results)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title)
    found_shares = [fmean(result.compressed.found for result in group) for group in groups.values()]
    axes.plot(list(groups), found_shares, marker="o", label="compressed")
    baseline = {
        depth: fmean(found_flags)
        for depth, group in groups.items()
        if (found_flags := [r.uncompressed.found for r in group if r.uncompressed is not None])
    }
    if baseline:
        axes.plot(list(baseline), list(baseline.values()), "k.--", label="uncompressed")
    for depth, share in zip(groups, found_shares, strict=True):
        sample_count = f"{len(groups[depth])}"
        axes.annotate(sample_count, (depth, share), (0, 6), textcoords="offset points", ha="center")
    depth_label = "depth in the text (%); at each point, the number of samples"
    axes.set(xlabel=depth_label, ylabel="found", xlim=(-3, 103), ylim=(-0.03, 1.12))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _render(figure, suffix)


def group_by_depth(results: Sequence["RecallResult"]) -> dict[float, list["RecallResult"]]:
    """Group results by depth in percent. Many depths are replaced by the middles of tenths."""
    by_tenths = len({result.sample.depth for result in results}) > MAX_DEPTHS
    groups: dict[float, list[RecallResult]] = {}
    for result in results:
        depth = result.sample.depth
        groups.setdefault(10 * min(9, depth // 10) + 5 if by_tenths else depth, []).append(result)
    return dict(sorted(groups.items()))


def draw_grid(grid: "Grid", suffix: str) -> bytes:
    """Return an image file: a panel for each task, with a line for each method over the ratio.

    Lines show the share of samples found, or the perplexity of continuations.
    """
    from matplotlib.figure import Figure

    tasks = grid.tasks
    figure = Figure(figsize=(3.2 * len(tasks) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        _draw_task(axes, grid, task)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return _render(figure, suffix)


def _draw_task(axes: "Axes", grid: "Grid", task: str) -> None:
    """Draw the panel of a task: a line for each method, and the uncompressed value."""
    for index, method in enumerate(grid.methods):
        results = {ratio: grid.select(task, method, ratio) for ratio in grid.ratios}
        scores = {ratio: _mean_score(column) for ratio, column in results.items() if column}
        ratio_factor = 2 ** (METHOD_SPREAD_OCTAVES * ((index + 0.5) / len(grid.methods) - 0.5))
        colour_cycle = index // len(COLOURS)
        axes.plot(
            *([ratio * ratio_factor for ratio in scores], list(scores.values())),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[(index + colour_cycle) % len(MARKERS)],
            ls=LINE_STYLES[colour_cycle % len(LINE_STYLES)],
            ms=5,
            lw=1.5,
            alpha=0.85,
            label=method,
        )
    if baseline := grid.baseline(task):
        axes.axhline(_mean_score(baseline), color="black", ls="--", lw=1, label="uncompressed")
    if any(r.found is None for r in grid.results.values() if r.setting.task == task):
        axes.set_ylabel("perplexity")
    else:
        axes.set(ylabel="found", ylim=(-0.03, 1.03))
        axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(grid.ratios, [f"{ratio:g}" for ratio in grid.ratios])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{task}, samples: {len(baseline)}", loc="left", fontsize="medium")
    axes.set_xlabel("times fewer cells")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _mean_score(results: Sequence["GridResult"]) -> float:
    """Return the share of samples found, or the perplexity of continuations."""
    if results[0].found is None:
        return math.exp(-fmean(result.log_probability for result in results))
    return fmean(bool(result.found) for result in results)


def _render(figure: "Figure", suffix: str) -> bytes:
    """Return a figure as an image file of the format of `suffix`."""
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=120)
    return content.getvalue()
