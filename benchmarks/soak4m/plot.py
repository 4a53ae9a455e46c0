"""Plot of complete runs: perplexity beside that of new sessions, time and memory."""

import io
from typing import Any

from benchmarks.colours import BLUE, GREEN, GREY, VERMILION

COLOURS = (BLUE, VERMILION, GREEN, GREY)


def draw_runs(reports: dict[str, dict[str, Any]], suffix: str) -> bytes:
    """Return the plot as the content of an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(4, 1, sharex=True)
    titles = (
        "perplexity of each window",
        "perplexity / that of a new session",
        "CPU time per token (ms)",
        "memory of the process (MB)",
    )
    for index, (name, report) in enumerate(reports.items()):
        windows, look = report["windows"], {"color": COLOURS[index % len(COLOURS)], "lw": 1}
        look["linestyle"] = "-" if index < len(COLOURS) else "--"
        millions = [tokens / 1e6 for tokens in windows["tokens"]]
        compared = [
            (x, of_run / fresh)
            for x, of_run, fresh in zip(
                millions, windows["compared"], windows["fresh"], strict=True
            )
            if fresh
        ]
        if not report["random_weights"]:
            panels[0].plot(millions, windows["perplexity"], label=name, **look)
            panels[1].plot(*zip(*compared, strict=True), marker="o", ms=3, **look)
        panels[2].plot(millions, windows["cpu_ms"], label=name, **look)
        panels[3].plot(millions, [b / 1e6 for b in windows["rss_bytes"]], label=name, **look)
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10, loc="left")
        panel.grid(alpha=0.3)
        panel.set_xlim(left=0)
    for panel in (panels[0], panels[2], panels[3]):
        panel.set_ylim(bottom=0)
    panels[3].set_xlabel("million tokens")
    panels[2].legend(loc="lower right", ncols=3, fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=110)
    return content.getvalue()
