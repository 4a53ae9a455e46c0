"""Plots of a result."""

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
    """Return PNG files by name, for the parts that the result holds."""
    files = {}
    if any(reading.measure.startswith("decode/") for reading in result.readings):
        files["decode.png"] = _render(result, _draw_decode)
    if result.traces:
        files["endless-time.png"] = _render(result, _draw_time)
        files["endless-memory.png"] = _render(result, _draw_held)
    return files


def _render(result: Result, draw: "Callable[[Axes, Result], None]") -> bytes:
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
    """Draw a line per variant, with error bars from minimum to maximum."""
    contexts: dict[str, dict[int, Spread]] = {}
    for measure in result.measures:
        if measure.part == "decode":
            for variant, spread in spreads(result, measure).items():
                contexts.setdefault(variant, {})[int(measure.key.partition("/")[2])] = spread
    for variant, spreads_by_context in contexts.items():
        middle = [spread.median for spread in spreads_by_context.values()]
        below = [spread.median - spread.least for spread in spreads_by_context.values()]
        above = [spread.most - spread.median for spread in spreads_by_context.values()]
        style = _variant_style(variant, list(contexts))
        axes.errorbar(list(spreads_by_context), middle, yerr=[below, above], capsize=3, **style)
    ticks = sorted(
        {context for spreads_by_context in contexts.values() for context in spreads_by_context}
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title("Decode (more is better)", loc="left")
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("tokens per second")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_time(axes: "Axes", result: Result) -> None:
    """Draw the median of each block as a line, and its slowest token as a dot."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for trace in result.traces:
        style = _trace_style(trace, result)
        axes.plot(trace.tokens, trace.median_ms, **style)
        axes.plot(trace.tokens, trace.slowest_ms, ".", color=style["color"], ms=3, alpha=0.45)
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
        axes.plot(
            trace.tokens, [nbytes / 1e6 for nbytes in trace.held], **_trace_style(trace, result)
        )
    axes.set_title("Endless decode: memory above the weights", loc="left")
    axes.set_ylabel("MB")
    _finish_endless(axes, result)


def _finish_endless(axes: "Axes", result: Result) -> None:
    axes.set_xlabel(f"tokens written on a budget of {result.settings['budget']:,}")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _trace_style(trace: Trace, result: Result) -> dict[str, Any]:
    """Return the line style of a trace; a cross marks the end of a shortened run."""
    longest = max(other.tokens[-1] for other in result.traces)
    label, end = trace.variant, trace.tokens[-1]
    style = {"color": COLOURS.get(peer_of(trace.variant), GREY), "lw": 1.8}
    if end < longest:
        return style | {"label": f"{label}, {end:,}", "marker": "X", "ms": 8, "markevery": [-1]}
    return style | {"label": label}


def _variant_style(variant: str, variants: list[str]) -> dict[str, Any]:
    """Return the style of a variant: colour by peer, line and marker by variant."""
    peer = peer_of(variant)
    index = [name for name in variants if peer_of(name) == peer].index(variant) % len(STYLES)
    return {
        "color": COLOURS.get(peer, GREY),
        "linestyle": STYLES[index],
        "marker": MARKERS[index],
        "label": variant,
    }
