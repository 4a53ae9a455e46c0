"""`kvkeep grid`: measure every compression method at every ratio on every task."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tqdm import tqdm

from kvkeep.cli.compression import check_calibrated, load_calibration_file
from kvkeep.cli.evaluate.grid_options import GridFiles, GridOptions, options_json, restore_options
from kvkeep.cli.evaluate.options import ModelOptions, load_haystack
from kvkeep.cli.options import NO_PROGRESS_OPTION, command, option_group
from kvkeep.cli.output import progress_bar, say
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import Dataset
from kvkeep.evaluate.grid_table import grid_markdown, page_with_grid
from kvkeep.evaluate.haystack import MANUAL
from kvkeep.evaluate.plots import draw_grid
from kvkeep.storage.files.atomic import write_atomic, write_json

if TYPE_CHECKING:
    from kvkeep import Model
    from kvkeep.compression.calibration.calibration import Calibration
    from kvkeep.evaluate.grid import Grid, GridSetting


@command(short_help="Measure all compression methods on all tasks.")
def grid(
    plan: GridOptions = option_group(GridOptions),
    files: GridFiles = option_group(GridFiles),
    options: ModelOptions = option_group(ModelOptions),
    no_progress: bool = NO_PROGRESS_OPTION,
) -> None:
    """Measure every compression method at every ratio on every task.

    Each text is prefilled once; every method compresses a fork of that session, and the questions
    are fed after that. Tables give the share of keys found (of all samples / of those found
    uncompressed) and the log-probability of the key's tokens. For task perplexity, they give the
    perplexity of the next 512 tokens and its increase over the uncompressed cache. Ctrl-C stops and
    shows what was measured; --resume continues.
    """
    files.check()
    if files.earlier_paths:
        merged, *others = [_load_grid(path) for path in files.earlier_paths]
        for other in others:
            merged.merge(other)
        _show(merged, files)
        return
    if files.resume and files.out is not None and files.out.is_file():
        saved = _load_grid(files.out).options
        plan, options = restore_options(plan, saved), restore_options(options, saved)
    check_calibrated(plan.methods, options.calibration)
    passkey_datasets = plan.passkey_datasets()
    model = options.load(not no_progress)
    calibration = load_calibration_file(options.calibration, model)
    grid_results = _open_grid(files.out, plan, options, model, calibration)
    try:
        datasets = dict(passkey_datasets)
        if any(task not in passkey_datasets for task in plan.tasks):
            datasets |= plan.text_datasets(load_haystack(plan.haystack, model))
        _measure(
            grid_results, model, calibration, plan, options, datasets, files.out, not no_progress
        )
    finally:
        if grid_results.results:
            _show(grid_results, files)


def _measure(
    grid: "Grid",
    model: "Model",
    calibration: "Calibration | None",
    plan: GridOptions,
    options: ModelOptions,
    datasets: Mapping[str, Dataset],
    out: Path | None,
    progress: bool,
) -> None:
    """Measure what is missing in the grid. out: the file to write after each sample, if any.

    Tasks take turns, so that an interrupted run has about as many samples of each.
    """
    from kvkeep.evaluate.grid import measure_sample

    total = plan.samples * len(plan.tasks)
    skip = _skip_printer()
    with progress_bar(total, progress, desc="measuring", unit=" samples", leave=False) as bar:
        for index, task in itertools.product(range(plan.samples), plan.tasks):
            if missing := grid.missing_settings(task, plan.seed, index, plan.methods, plan.ratios):
                sample = datasets[task].sample(index)
                new_results = measure_sample(
                    model, sample, missing, calibration, options.prefill_step, plan.kv_bits, skip
                )
                try:
                    for result in new_results:
                        grid.add(result)
                finally:
                    write_json(out, grid.as_json())
            bar.update(1)


def _skip_printer() -> "Callable[[GridSetting, InvalidArgument], None]":
    """Return a function that prints why a setting has no result, once for all samples of a task."""
    printed = set[tuple[str, str, float]]()

    def skip(setting: "GridSetting", error: InvalidArgument) -> None:
        key = setting.task, setting.method, setting.ratio
        if key not in printed:
            printed.add(key)
            name = f"{setting.task}, {setting.method} at ratio {setting.ratio:g}"
            with tqdm.external_write_mode(file=sys.stderr):  # above the progress bar
                reason = str(error).partition(". Use ")[0]  # a grid has no such settings
                say(f"{name}: left out where it is impossible: {reason}")

    return skip


def _open_grid(
    out: Path | None,
    plan: GridOptions,
    options: ModelOptions,
    model: "Model",
    calibration: "Calibration | None",
) -> "Grid":
    """Return the grid in the file `out`, or a new one. Raises InvalidArgument if it differs."""
    from kvkeep.evaluate.grid import Grid

    metadata = {
        "model": model.name,
        "fingerprint": model.fingerprint.digest(),
        **options.record(calibration),
        "junk": plan.junk,
        "tokens": plan.tokens,
        "haystack": plan.haystack,
        "kv_bits": plan.kv_bits,
    }
    grid = Grid(metadata) if out is None or not out.is_file() else _load_grid(out)
    grid.require_same_metadata(metadata)
    grid.options = options_json(plan, options)
    return grid


def _load_grid(path: Path) -> "Grid":
    """Read the grid in a file that `--out` wrote. Raises InvalidArgument for another file."""
    from kvkeep.evaluate.grid import Grid

    try:
        grid = Grid.from_json(json.loads(path.read_text(encoding="utf-8")))
        grid.metadata.setdefault("haystack", MANUAL)  # older files do not say which text
        grid.metadata.setdefault("kv_bits", None)
        return grid
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} was not written by `kvkeep grid --out`") from error


def _show(grid: "Grid", files: GridFiles) -> None:
    """Draw the plot of `--plot`, and write the tables to the page of `--into`, or print them."""
    if not grid.results:
        raise InvalidArgument("there are no results to show yet")
    if files.plot is not None:
        write_atomic(files.plot, draw_grid(grid, files.plot.suffix))
    if files.page is not None:
        write_atomic(files.page, page_with_grid(files.page, grid))
    else:
        click.echo(grid_markdown(grid))
