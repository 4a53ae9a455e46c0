"""Drawing of the README's plot."""

import io
from typing import Any

from benchmarks.colours import BLUE, GREY, VERMILION

COLOURS = (GREY, VERMILION, BLUE)
STYLES = ("-", "--", "-")


def draw_picture(curves: list[dict[str, Any]], suffix: str) -> bytes:
    """Return the plot as the content of an image file: perplexity left, memory right.

    curves: full attention, the window alone and the window with sinks, as saved by `picture`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for curve, colour, style in zip(curves, COLOURS, STYLES, strict=True):
        points = curve["points"]
        scored = [p for p in points if p["perplexity"] is not None]
        tokens = [p["tokens"] for p in points]
        megabytes = [p["kv_bytes"] / 1e6 for p in points]
        look = {"color": colour, "linestyle": style, "linewidth": 2, "label": curve["name"]}
        left.plot([p["tokens"] for p in scored], [p["perplexity"] for p in scored], **look)
        right.plot(tokens, megabytes, **look)
        if curve["refusal"]:
            _mark_end(left, tokens[-1], scored[-1]["perplexity"], "", 0)
            _mark_end(right, tokens[-1], megabytes[-1], f"refused after {tokens[-1]:,}", 8)
    left.set_title("Perplexity of the text so far (lower is better)", fontsize=11)
    right.set_title("Memory of keys and values (MB)", fontsize=11)
    for panel in (left, right):
        panel.set_xlabel("tokens read")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.set_xticks(range(0, points[-1]["tokens"] + 1, 5000))
    left.legend(loc="lower right")
    bounded = f"both windows: {megabytes[-1]:.1f} MB"
    right.annotate(
        bounded, (tokens[-1], megabytes[-1]), xytext=(0, 6), textcoords="offset points", ha="right"
    )

    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=150)
    return content.getvalue()


def _mark_end(panel: Any, x: float, y: float, words: str, offset: int) -> None:
    panel.plot([x], [y], marker="X", markersize=10, color=GREY)
    panel.annotate(
        words, (x, y), xytext=(offset, 0), textcoords="offset points", va="center", color=GREY
    )
