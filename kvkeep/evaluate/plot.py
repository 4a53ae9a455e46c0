"""Pictures: which can be drawn, and that of a perplexity measurement."""

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.perplexity import RECENT, PerplexityPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def check_plottable(path: Path) -> None:
    """Raises InvalidArgument for a format that is not drawn, and where matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidArgument(
            f"a plot must end in one of {', '.join(FORMATS)}; found {path.name!r}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("a plot needs matplotlib: pip install kvkeep[plot]")


def draw_perplexity(points: Sequence[PerplexityPoint], title: str, suffix: str) -> bytes:
    """The picture as a file's content: perplexity above, memory below, over tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    tokens = [point.tokens for point in points]
    figure.suptitle(title)

    above.plot(tokens, [p.perplexity for p in points], marker=".", label="all scored tokens")
    above.plot(tokens, [p.recent for p in points], marker=".", alpha=0.5, label=f"last {RECENT}")
    above.set_ylabel("perplexity")
    above.legend()
    above.set_xlim(0, tokens[-1])
    above.grid(alpha=0.3)

    below.plot(tokens, [p.kv_bytes / 1e6 for p in points], color="C2", label="memory (MB)")
    below.set_ylabel("keys and values (MB)")
    below.set_xlabel("tokens")
    below.set_ylim(bottom=0)
    below.grid(alpha=0.3)
    cells = below.twinx()
    cells.plot(tokens, [p.kv_cells for p in points], color="C3", linestyle="--", label="cells")
    cells.set_ylabel("cells")
    cells.set_ylim(bottom=0)
    below.legend(handles=[*below.lines, *cells.lines], loc="lower right")
    return picture(figure, suffix)


def picture(figure: "Figure", suffix: str) -> bytes:
    """A figure as the content of a file with this ending."""
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=120)
    return content.getvalue()
