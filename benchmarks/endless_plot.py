"""Plot of an endless run: time per token above, memory below."""

import io

from benchmarks.colours import BLUE, GREEN, GREY, VERMILION
from benchmarks.endless_run import Endless


def draw_endless(result: Endless, suffix: str) -> bytes:
    """Return the plot as the content of an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    width = result.plan.trace
    tokens = [moment.tokens for moment in result.trace]
    figure.suptitle(
        f"{result.tokens:,} tokens written after a prompt of {result.prompt_tokens:,}, "
        f"on {result.max_kv_size} cells"
    )

    above.plot(
        tokens,
        [m.slowest_ms for m in result.trace],
        color=GREY,
        lw=0.8,
        label=f"slowest of {width}",
    )
    above.plot(tokens, [m.median_ms for m in result.trace], color=BLUE, label=f"median of {width}")
    above.set_ylabel("time per token (ms)")
    above.set_ylim(0, 4 * result.median_ms)  # a hiccup of the machine may be far above
    above.legend(loc="upper right", ncols=2)

    below.plot(
        tokens, [m.rss_bytes / 1e6 for m in result.trace], color=VERMILION, label="whole process"
    )
    below.axhline(
        result.kv_bytes / 1e6,
        color=GREEN,
        linestyle="--",
        label=f"keys and values: {result.kv_bytes / 1e6:.1f} MB",
    )
    below.set_ylabel("memory (MB)")
    below.set_xlabel("tokens written")
    below.set_ylim(0, 1.25 * max(m.rss_bytes for m in result.trace) / 1e6)
    below.legend(loc="center right")
    for panel in (above, below):
        panel.grid(alpha=0.3)
        panel.set_xlim(left=0)

    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=120)
    return content.getvalue()
