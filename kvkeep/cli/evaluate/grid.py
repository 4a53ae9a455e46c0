"""`kvkeep grid`: every method of compression at every ratio on every task."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.compression import (
    METHOD_NAMES,
    UNCALIBRATED,
    check_calibrated,
    ratio,
    way,
)
from kvkeep.cli.evaluate.grid_choice import (
    GRID_TASKS,
    GridChoice,
    GridFiles,
    as_asked,
    asked_json,
)
from kvkeep.cli.evaluate.options import (
    ModelChoice,
    haystack_option,
    listed,
    model_options,
    one_of,
)
from kvkeep.cli.memory import BIT_NAMES
from kvkeep.cli.options import collected, whole_number
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import MANUAL
from kvkeep.storage.files.atomic import write_atomic

if TYPE_CHECKING:
    from kvkeep.evaluate.grid import Grid

_CHOICE = [
    click.option(
        "--methods",
        metavar="NAME[:BUDGET],...",
        type=listed(way),
        default=",".join(UNCALIBRATED),
        show_default="all that need no calibration",
        help=f"Of {', '.join(METHOD_NAMES)}. BUDGET: heads or uniform.",
    ),
    click.option(
        "--ratios",
        metavar="X,...",
        type=listed(ratio),
        default="2,4,8",
        help="To how many times fewer cells.",
    ),
    click.option(
        "--tasks",
        metavar="NAME,...",
        type=listed(one_of(*GRID_TASKS)),
        default=",".join(GRID_TASKS),
        show_default="all",
        help=f"Of {', '.join(GRID_TASKS)}.",
    ),
    click.option(
        "--samples", metavar="N", type=whole_number(1), default=40, help="Texts of each task."
    ),
    click.option(
        "--junk",
        metavar="N",
        type=whole_number(1),
        default=250,
        help="Repetitions of the text that hides pass keys.",
    ),
    click.option(
        "--tokens",
        metavar="N",
        type=whole_number(16),
        default=4000,
        help="Of a real text, about.",
    ),
    haystack_option(),
    click.option(
        "--kv-bits",
        type=click.Choice(BIT_NAMES),
        show_default="not quantised",
        help="Keep all cells in so many bits, the uncompressed ones, too.",
    ),
    click.option(
        "--seed", metavar="N", type=whole_number(0), default=0, help="Same seed, same texts."
    ),
]

_FILES = [
    click.option(
        "--from",
        "earlier",
        metavar="FILE.json",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        multiple=True,
        help="Measure nothing: show what --out wrote. Repeatable: all of them together.",
    ),
    click.option(
        "--out",
        metavar="FILE.json",
        type=click.Path(path_type=Path),
        help="Write every reading there, after each sample.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with what is in --out, as it was asked for but for what is said now.",
    ),
    click.option(
        "--plot",
        metavar="FILE.png",
        type=click.Path(path_type=Path),
        help="Draw a panel for each task, a line for each method.",
    ),
    click.option(
        "--into",
        "page",
        metavar="FILE.md",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Write the tables between this page's markers.",
    ),
]


@click.command(short_help="Measure all methods of compression on all tasks.")
@collected(GridChoice, "plan", _CHOICE)
@collected(GridFiles, "files", _FILES)
@model_options()
@click.option("--no-progress", is_flag=True, help="No progress bars.")
def grid(plan: GridChoice, files: GridFiles, choice: ModelChoice, no_progress: bool) -> None:
    """Measure every method of compression at every ratio on every task.

    Each text is read once; every method compresses a copy of that memory and is asked afterwards.
    The tables give the share found, of all samples / of those that the uncompressed model finds,
    and the log-probability of a token of the key; of task perplexity that of the next 512 tokens,
    and how much higher it is than from the whole memory. Ctrl-C ends it with what was measured;
    --resume goes on.
    """
    files.check()
    if files.earlier:
        found = _joined(files.earlier)
        _show(found, files)
        return
    if files.resume and files.out is not None and files.out.is_file():
        earlier = _read(files.out).asked
        plan, choice = as_asked(plan, earlier), as_asked(choice, earlier)
    check_calibrated(plan.methods, choice.calibration)
    passkeys = plan.passkeys()

    from kvkeep.cli.evaluate.grid_runner import measure_grid

    model = choice.load(not no_progress)
    about = _about(plan, choice, model.name)
    found = _opened(files, about)
    found.asked = asked_json(plan, choice)
    try:
        measure_grid(model, found, plan, passkeys, choice, files.out, not no_progress)
    finally:
        if found.readings:
            _show(found, files)


def _about(plan: GridChoice, choice: ModelChoice, model: str) -> dict[str, Any]:
    """What all readings of a file have in common."""
    return {
        "model": model,
        "dtype": choice.dtype,
        "weights": choice.weights,
        "calibration": choice.calibration.name if choice.calibration else None,
        "junk": plan.junk,
        "tokens": plan.tokens,
        "haystack": plan.haystack,
        "kv_bits": plan.kv_bits,
    }


def _opened(files: GridFiles, about: dict[str, Any]) -> "Grid":
    from kvkeep.evaluate.grid import Grid

    if files.out is None or not files.out.is_file():
        return Grid(about)
    found = _read(files.out)
    found.require_same(about)
    return found


def _joined(paths: tuple[Path, ...]) -> "Grid":
    first, *others = [_read(path) for path in paths]
    for other in others:
        first.join(other)
    return first


def _read(path: Path) -> "Grid":
    from kvkeep.evaluate.grid import Grid

    try:
        found = Grid.from_json(json.loads(path.read_text(encoding="utf-8")))
        found.about.setdefault("haystack", MANUAL)  # before there was another one
        found.about.setdefault("kv_bits", None)
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} is not a result of `kvkeep grid --out`") from error


def _show(found: "Grid", files: GridFiles) -> None:
    from kvkeep.evaluate.grid_plot import draw_grid
    from kvkeep.evaluate.grid_table import filled, grid_markdown

    if not found.readings:
        raise InvalidArgument("there is nothing in it to show: no reading was made yet")
    if files.plot is not None:
        write_atomic(files.plot, draw_grid(found, files.plot.suffix))
    if files.page is not None:
        write_atomic(files.page, filled(files.page, found))
    else:
        click.echo(grid_markdown(found))
