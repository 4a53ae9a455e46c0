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

    whole, recent = [p.perplexity for p in points], [p.recent for p in points]
    above.plot(tokens, whole, marker="o", ms=4, label="all scored tokens")
    if recent != whole:  # as they are where there are no more
        style = {"marker": "s", "ms": 4, "ls": "--", "mfc": "none"}
        above.plot(tokens, recent, label=f"last {RECENT}", **style)
    above.set_ylabel("perplexity")
    above.legend()
    above.set_xlim(0, tokens[-1] * 1.02)
    above.grid(alpha=0.3)

    sizes, cells = [p.kv_bytes / 1e6 for p in points], [p.kv_cells for p in points]
    below.plot(tokens, sizes, color="C2", marker="o", ms=4, label="memory (MB)")
    below.set_ylabel("keys and values (MB)")
    below.set_xlabel("tokens")
    below.set_ylim(0, 1.08 * max(*sizes, 1e-6))
    below.grid(alpha=0.3)
    other = below.twinx()
    style = {"marker": "s", "ms": 4, "ls": "--", "mfc": "none"}
    other.plot(tokens, cells, color="C3", label="cells", **style)
    other.set_ylabel("cells")
    other.set_ylim(0, 1.25 * max(*cells, 1))  # beside the other curve, which it would often cover
    below.legend(handles=[*below.lines, *other.lines], loc="lower right")
    return picture(figure, suffix)


def picture(figure: "Figure", suffix: str) -> bytes:
    """A figure as the content of a file with this ending."""
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=120)
    return content.getvalue()
