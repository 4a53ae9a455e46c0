"""`kvkeep grid`: measure every compression method at every ratio on every task."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.compression import (
    METHOD_NAMES,
    UNCALIBRATED,
    check_calibrated,
    method_and_budget,
    ratio,
)
from kvkeep.cli.evaluate.grid_choice import (
    GRID_TASKS,
    GridChoice,
    GridFiles,
    choices_json,
    with_earlier,
)
from kvkeep.cli.evaluate.options import (
    ModelChoice,
    haystack_option,
    listed,
    model_options,
    one_of,
)
from kvkeep.cli.memory import BIT_NAMES
from kvkeep.cli.options import collect_options, whole_number
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import MANUAL
from kvkeep.storage.files.atomic import write_atomic

if TYPE_CHECKING:
    from kvkeep.evaluate.grid import Grid

_CHOICE = [
    click.option(
        "--methods",
        metavar="NAME[:BUDGET],...",
        type=listed(method_and_budget),
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
@collect_options(GridChoice, "plan", _CHOICE)
@collect_options(GridFiles, "files", _FILES)
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
        _show(_joined(files.earlier), files)
        return
    if files.resume and files.out is not None and files.out.is_file():
        earlier = _read(files.out).asked
        plan, choice = with_earlier(plan, earlier), with_earlier(choice, earlier)
    check_calibrated(plan.methods, choice.calibration)
    passkeys = plan.passkey_tasks()

    from kvkeep.cli.evaluate.grid_runner import measure_grid

    model = choice.load(not no_progress)
    about = _about(plan, choice, model.name)
    results = _opened(files, about)
    results.asked = choices_json(plan, choice)
    try:
        measure_grid(model, results, plan, passkeys, choice, files.out, not no_progress)
    finally:
        if results.readings:
            _show(results, files)


def _about(plan: GridChoice, choice: ModelChoice, model: str) -> dict[str, Any]:
    """Return the settings that all readings in a file share."""
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
    """Return the grid in the output file, or an empty one.

    Raises InvalidArgument if the file was measured with other settings.
    """
    from kvkeep.evaluate.grid import Grid

    if files.out is None or not files.out.is_file():
        return Grid(about)
    grid = _read(files.out)
    grid.require_same(about)
    return grid


def _joined(paths: tuple[Path, ...]) -> "Grid":
    """Merge the readings of several files."""
    first, *others = [_read(path) for path in paths]
    for other in others:
        first.join(other)
    return first


def _read(path: Path) -> "Grid":
    """Read the file of an earlier run. Raises InvalidArgument if it is not one."""
    from kvkeep.evaluate.grid import Grid

    try:
        grid = Grid.from_json(json.loads(path.read_text(encoding="utf-8")))
        grid.about.setdefault("haystack", MANUAL)  # older files do not say which text
        grid.about.setdefault("kv_bits", None)
        return grid
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} is not a result of `kvkeep grid --out`") from error


def _show(grid: "Grid", files: GridFiles) -> None:
    """Draw the plot, and write the tables into the page or to standard output."""
    from kvkeep.evaluate.grid_plot import draw_grid
    from kvkeep.evaluate.grid_table import filled, grid_markdown

    if not grid.readings:
        raise InvalidArgument("there is nothing to show: no reading was made yet")
    if files.plot is not None:
        write_atomic(files.plot, draw_grid(grid, files.plot.suffix))
    if files.page is not None:
        write_atomic(files.page, filled(files.page, grid))
    else:
        click.echo(grid_markdown(grid))
