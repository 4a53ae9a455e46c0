"""The README's picture: what three memories know of a text, and what they take.

Full attention, a window alone, and a window with attention sinks read the same text. Full attention
ends at the model's trained length, where kvkeep refuses to go on.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.command import Measurement, check_outputs, dtype_option, model_option
from benchmarks.machine import Machine, describe_machine
from benchmarks.picture_plot import draw_picture
from benchmarks.progress import bar
from kvkeep import Model, Session, load_model
from kvkeep.errors import ContextFull
from kvkeep.evaluate.manual import manual_text
from kvkeep.evaluate.perplexity import PerplexityPoint, perplexity_points
from kvkeep.evaluate.plot import check_plottable
from kvkeep.storage.files.atomic import write_atomic, write_json
from kvkeep.types import DtypeName

FIRST = 1024  # tokens read before any is scored
COMPARED = 4096  # end of the stretch that all three are compared on
STEP = 256  # tokens between two points; COMPARED is a multiple


@dataclass(frozen=True)
class Point:
    """perplexity: of tokens `FIRST` to `tokens - 1`, null before. kv_bytes: held at that moment."""

    tokens: int
    perplexity: float | None
    kv_cells: int
    kv_bytes: int


@dataclass(frozen=True)
class Curve:
    """One memory over the text.

    compared: perplexity of tokens `FIRST` to `COMPARED - 1`. refusal: what it said to the first
    token that it could not take; null if it read all.
    """

    name: str
    policy: str
    max_kv_size: int
    keep: int
    compared: float | None
    perplexity: float
    refusal: str | None
    points: tuple[Point, ...]


def measure_curves(
    model: Model, ids: list[int], budget: int, progress: Callable[[int], None]
) -> Iterator[Curve]:
    trained = model.spec.max_positions
    memories = {
        "full attention": model.session(policy="full", prefill_step=STEP),
        f"window of {budget}": model.session(budget, keep=0, prefill_step=STEP),
        f"window of {budget} with 4 sinks": model.session(budget, keep=4, prefill_step=STEP),
    }
    for name, session in memories.items():
        readable = ids[:trained] if session.policy == "full" else ids
        yield _curve(name, session, readable, ids[len(readable) :], progress)


def _curve(
    name: str, session: Session, ids: list[int], rest: list[int], progress: Callable[[int], None]
) -> Curve:
    points: list[PerplexityPoint] = []
    for point in perplexity_points(session, ids, FIRST):
        points.append(point)
        progress(STEP)
    compared = [p.perplexity for p in points if p.tokens == COMPARED]
    return Curve(
        name=name,
        policy=session.policy,
        max_kv_size=session.max_kv_size,
        keep=session.keep,
        compared=round(compared[0], 4) if compared else None,
        perplexity=round(points[-1].perplexity, 4),
        refusal=_refusal(session, rest[:1]),
        points=tuple(_point(p) for p in points),
    )


def _point(point: PerplexityPoint) -> Point:
    known = round(point.perplexity, 4) if point.scored else None
    return Point(point.tokens, known, point.kv_cells, point.kv_bytes)


def _refusal(session: Session, next_tokens: list[int]) -> str | None:
    if not next_tokens:
        return None
    try:
        session.feed(next_tokens)
    except ContextFull as refusal:
        return str(refusal)
    return None


def table(curves: list[dict[str, Any]]) -> str:
    """The result for reading."""
    lines = [f"{'memory':<28}{f'perplexity of {FIRST}-{COMPARED - 1}':>26}{'to the end':>12}"]
    for curve in curves:
        compared = "-" if curve["compared"] is None else f"{curve['compared']:.2f}"
        lines.append(f"{curve['name']:<28}{compared:>26}{curve['perplexity']:>12.2f}")
    return "\n".join(lines)


def _as_json(curves: list[Curve], machine: Machine, model: str, dtype: DtypeName) -> dict[str, Any]:
    settings = {"model": model, "dtype": dtype, "first": FIRST, "compared_end": COMPARED}
    return {
        "machine": dataclasses.asdict(machine),
        "settings": settings,
        "curves": [dataclasses.asdict(curve) for curve in curves],
    }


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=20_000, type=click.IntRange(FIRST + 1), help="Tokens to read.")
@click.option("--max-kv-size", default=512, type=click.IntRange(5), help="Cells of the windows.")
@model_option
@dtype_option
@click.option(
    "--out",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    default=Path("docs/results/perplexity-and-memory.json"),
    help="Where the result goes.",
)
@click.option(
    "--plot",
    metavar="FILE.png",
    type=click.Path(path_type=Path),
    default=Path("docs/perplexity-and-memory.png"),
    help="Where the picture goes.",
)
@click.option("--redraw", is_flag=True, help="Draw what --out already holds; measure nothing.")
def picture(
    tokens: int, max_kv_size: int, name: str, dtype: DtypeName, out: Path, plot: Path, redraw: bool
) -> None:
    """Measure and draw perplexity and memory of three memories."""
    check_plottable(plot)
    check_outputs(out, plot)
    if not redraw:
        model = load_model(name, dtype=dtype, progress=True)
        ids = model.text.encode(manual_text())[:tokens]
        machine = describe_machine()
        with bar(2 * len(ids) + min(len(ids), model.spec.max_positions), "reading") as shown:
            curves = list(measure_curves(model, ids, max_kv_size, shown))
        write_json(out, _as_json(curves, machine, name, dtype))
    found = json.loads(out.read_text(encoding="utf-8"))["curves"]
    click.echo(table(found))
    write_atomic(plot, draw_picture(found, plot.suffix))


if __name__ == "__main__":
    picture()
