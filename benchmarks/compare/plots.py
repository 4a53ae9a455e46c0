"""The pictures of a result."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.colours import BLUE, GREEN, GREY, PURPLE, VERMILION
from benchmarks.compare.results import Result, Trace
from benchmarks.compare.summary import peer_of, spreads
from benchmarks.prefill import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"kvkeep": BLUE, "llama.cpp": VERMILION, "transformers": GREEN, "mlx-lm": PURPLE}
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")


def draw_plots(result: Result) -> dict[str, bytes]:
    """PNG files by name, of what the result holds."""
    drawn = {}
    if any(each.measure.startswith("decode/") for each in result.readings):
        drawn["decode.png"] = _drawn(result, _draw_decode)
    if result.traces:
        drawn["endless-time.png"] = _drawn(result, _draw_time)
        drawn["endless-memory.png"] = _drawn(result, _draw_held)
    return drawn


def _drawn(result: Result, draw: "Callable[[Axes, Result], None]") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes, result)
    axes.grid(alpha=0.3)
    axes.margins(y=0.12)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if result.quick:
        figure.text(0.99, 0.01, "small sizes: a first look", color=GREY, fontsize=8, ha="right")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def _draw_decode(axes: "Axes", result: Result) -> None:
    """A line for each variant, with bars from the least to the most."""
    contexts: dict[str, dict[int, Spread]] = {}
    for measure in result.measures:
        if measure.part == "decode":
            for variant, spread in spreads(result, measure).items():
                contexts.setdefault(variant, {})[int(measure.key.partition("/")[2])] = spread
    for variant, found in contexts.items():
        middle = [each.median for each in found.values()]
        below = [each.median - each.least for each in found.values()]
        above = [each.most - each.median for each in found.values()]
        look = _look(variant, list(contexts))
        axes.errorbar(list(found), middle, yerr=[below, above], capsize=3, **look)
    ticks = sorted({context for found in contexts.values() for context in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title("Decode (more is better)", loc="left")
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("tokens per second")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_time(axes: "Axes", result: Result) -> None:
    """Lines: the median of each block. Dots: its slowest token."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for trace in result.traces:
        look = _line(trace, result)
        axes.plot(trace.tokens, trace.median_ms, **look)
        axes.plot(trace.tokens, trace.slowest_ms, ".", color=look["color"], ms=3, alpha=0.45)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    width = result.traces[0].tokens[0]
    axes.set_title(f"Endless decode: medians of {width} tokens; dots: the slowest", loc="left")
    axes.set_ylabel("time per token (ms)")
    _finish_endless(axes, result)


def _draw_held(axes: "Axes", result: Result) -> None:
    for trace in result.traces:
        axes.plot(trace.tokens, [each / 1e6 for each in trace.held], **_line(trace, result))
    axes.set_title("Endless decode: memory above the weights", loc="left")
    axes.set_ylabel("MB")
    _finish_endless(axes, result)


def _finish_endless(axes: "Axes", result: Result) -> None:
    axes.set_xlabel(f"tokens written on a budget of {result.settings['budget']:,}")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _line(trace: Trace, result: Result) -> dict[str, Any]:
    """A cross ends the line of a run that is shorter than others."""
    whole = max(each.tokens[-1] for each in result.traces)
    label, end = trace.variant, trace.tokens[-1]
    look = {"color": COLOURS.get(peer_of(trace.variant), GREY), "lw": 1.8}
    if end < whole:
        return look | {"label": f"{label}, {end:,}", "marker": "X", "ms": 8, "markevery": [-1]}
    return look | {"label": label}


def _look(variant: str, variants: list[str]) -> dict[str, Any]:
    """A colour for each peer; line and marker tell its variants apart."""
    peer = peer_of(variant)
    index = [each for each in variants if peer_of(each) == peer].index(variant) % len(STYLES)
    return {
        "color": COLOURS.get(peer, GREY),
        "linestyle": STYLES[index],
        "marker": MARKERS[index],
        "label": variant,
    }
