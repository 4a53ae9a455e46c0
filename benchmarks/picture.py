"""The README's plot: perplexity and KV memory of three policies over one text.

Full attention, a window alone, and a window with attention sinks evaluate the same text. Full
attention ends at the model's trained length, beyond which kvkeep raises ContextFull.
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
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.evaluate.haystack import manual_text
from kvkeep.evaluate.perplexity import PerplexityPoint, perplexity_points
from kvkeep.evaluate.plots import check_plottable
from kvkeep.storage.files.atomic import write_atomic, write_json
from kvkeep.types import DtypeName

SCORE_FROM = 1024  # tokens evaluated before the first score
COMPARE_UP_TO = 4096  # all three are compared on tokens before this one
STEP = 256  # tokens between two points; COMPARE_UP_TO is a multiple


@dataclass(frozen=True)
class Point:
    """perplexity: of tokens `SCORE_FROM` to `tokens - 1`, null before. kv_bytes: held then."""

    tokens: int
    perplexity: float | None
    kv_cells: int
    kv_bytes: int


@dataclass(frozen=True)
class Curve:
    """One policy over the text.

    compared: perplexity of tokens `SCORE_FROM` to `COMPARE_UP_TO - 1`. refusal: the error at the
    first token that did not fit; null if all did.
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
    for point in perplexity_points(session, ids, SCORE_FROM):
        points.append(point)
        progress(STEP)
    compared = [p.perplexity for p in points if p.tokens == COMPARE_UP_TO]
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
    perplexity = round(point.perplexity, 4) if point.scored else None
    return Point(point.tokens, perplexity, point.kv_cells, point.kv_bytes)


def _refusal(session: Session, next_tokens: list[int]) -> str | None:
    if not next_tokens:
        return None
    try:
        session.feed(next_tokens)
    except ContextFull as refusal:
        return str(refusal)
    return None


def table(curves: list[dict[str, Any]]) -> str:
    """Return the result as text."""
    lines = [
        f"{'memory':<28}{f'perplexity of {SCORE_FROM}-{COMPARE_UP_TO - 1}':>26}{'to the end':>12}"
    ]
    for curve in curves:
        compared = "-" if curve["compared"] is None else f"{curve['compared']:.2f}"
        lines.append(f"{curve['name']:<28}{compared:>26}{curve['perplexity']:>12.2f}")
    return "\n".join(lines)


def _as_json(
    curves: list[dict[str, Any]], machine: Machine, model: str, dtype: DtypeName
) -> dict[str, Any]:
    settings = {"model": model, "dtype": dtype, "first": SCORE_FROM, "compared_end": COMPARE_UP_TO}
    return {
        "machine": dataclasses.asdict(machine),
        "settings": settings,
        "curves": curves,
    }


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option(
    "--tokens", default=20_000, type=click.IntRange(SCORE_FROM + 1), help="Tokens to evaluate."
)
@click.option(
    "--max-kv-size", default=512, type=click.IntRange(5), help="Budget of both windows, in cells."
)
@model_option
@dtype_option
@click.option(
    "--out",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    help="Write the result to this file.",
)
@click.option(
    "--plot",
    metavar="FILE.png",
    type=click.Path(path_type=Path),
    help="Write the plot to this file.",
)
@click.option("--redraw", is_flag=True, help="Plot the existing --out; measure nothing.")
def picture(
    tokens: int,
    max_kv_size: int,
    name: str,
    dtype: DtypeName,
    out: Path | None,
    plot: Path | None,
    redraw: bool,
) -> None:
    """Measure and plot perplexity and memory of three policies."""
    if plot is not None:
        check_plottable(plot)
    check_outputs(out, plot)
    curves: list[Any] = []
    if redraw:
        curves = saved_curves(out)
    else:
        model = load_model(name, dtype=dtype, progress=True)
        ids = model.text.encode(manual_text())[:tokens]
        machine = describe_machine()
        with bar(2 * len(ids) + min(len(ids), model.spec.max_positions), "evaluating") as progress:
            for curve in measure_curves(model, ids, max_kv_size, progress):
                curves.append(dataclasses.asdict(curve))
                write_json(out, _as_json(curves, machine, name, dtype))
    click.echo(table(curves))
    if plot is not None:
        write_atomic(plot, draw_picture(curves, plot.suffix))


def saved_curves(path: Path | None) -> list[dict[str, Any]]:
    """Return the curves of an earlier result. Raises InvalidArgument if there are none."""
    if path is None:
        raise InvalidArgument("--redraw plots an earlier result: add --out FILE.json")
    try:
        curves: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["curves"]
    except FileNotFoundError as error:
        raise InvalidArgument(f"{path} does not exist: measure it without --redraw") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is no result of this benchmark") from error
    return curves


if __name__ == "__main__":
    picture()
