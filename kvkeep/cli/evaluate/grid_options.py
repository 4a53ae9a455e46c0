"""The options of `kvkeep grid`: what is measured, and the files that are read and written."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvkeep.cli.compression import METHOD_NAMES, UNCALIBRATED_METHODS, parse_method, parse_ratio
from kvkeep.cli.evaluate.options import HAYSTACK_OPTION, ModelOptions, comma_separated
from kvkeep.cli.memory import BIT_NAMES
from kvkeep.cli.options import (
    choice_option,
    file_option,
    integer_option,
    is_given,
    is_in_command_line,
    option,
)
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import ContinuationDataset, Dataset, NeedleDataset, PasskeyDataset
from kvkeep.evaluate.grid_table import page_with_grid
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.plots import check_plottable
from kvkeep.evaluate.tasks import TASKS
from kvkeep.storage.files.atomic import check_writable
from kvkeep.types import BitsName

PASSKEY_TASKS = {  # key type and task
    "passkey-number": ("number", "single"),
    "passkey-words": ("words", "single"),
    "several": ("number", "several"),
    "second": ("number", "second"),
}
NEEDLE_TASKS = {"needle": "single"} | {f"needle-{task}": task for task in TASKS if task != "single"}
PERPLEXITY = "perplexity"  # of a continuation
GRID_TASKS = (*PASSKEY_TASKS, *NEEDLE_TASKS, PERPLEXITY)


def parse_grid_task(name: str) -> str:
    """Option type: the name of a task of `kvkeep grid`, returned unchanged."""
    if name not in GRID_TASKS:
        raise click.BadParameter(f"expected task names ({', '.join(GRID_TASKS)}); found {name!r}")
    return name


@dataclass(frozen=True)
class GridOptions:
    """The options for what a grid measures."""

    methods: tuple[str, ...] = option(
        metavar="NAME[:BUDGET],...",
        type=comma_separated(parse_method),
        default=",".join(UNCALIBRATED_METHODS),
        show_default="all that need no calibration",
        help=f"Methods to measure, from {', '.join(METHOD_NAMES)}. BUDGET: heads or uniform.",
    )
    ratios: tuple[float, ...] = option(
        metavar="X,...",
        type=comma_separated(parse_ratio),
        default="2,4,8",
        help="Compression ratio.",
    )
    tasks: tuple[str, ...] = option(
        metavar="NAME,...",
        type=comma_separated(parse_grid_task),
        default=",".join(GRID_TASKS),
        show_default="all",
        help=f"Tasks to run, from {', '.join(GRID_TASKS)}.",
    )
    samples: int = integer_option(default=40, help="Number of texts for each task.")
    junk: int = integer_option(default=250, help="Repetitions of the filler text in passkey tasks.")
    tokens: int = integer_option(
        minimum=16, default=4000, help="Approximate tokens of a real text."
    )
    haystack: str = HAYSTACK_OPTION
    kv_bits: BitsName | None = choice_option(
        BIT_NAMES,
        "Bits of all cells, also of the uncompressed cache.",
        show_default="not quantised",
    )
    seed: int = integer_option(minimum=0, default=0, help="Seed of the texts.")

    def passkey_datasets(self) -> dict[str, Dataset]:
        """Return the datasets of the passkey tasks, by task. Raises InvalidArgument."""
        return {
            name: PasskeyDataset(self.junk, *PASSKEY_TASKS[name], seed=self.seed)
            for name in self.tasks
            if name in PASSKEY_TASKS
        }

    def text_datasets(self, haystack: Haystack) -> dict[str, Dataset]:
        """Return the datasets of the needle and perplexity tasks, by task. haystack: their text."""
        datasets: dict[str, Dataset] = {
            name: NeedleDataset(haystack, self.tokens, task=NEEDLE_TASKS[name], seed=self.seed)
            for name in self.tasks
            if name in NEEDLE_TASKS
        }
        if PERPLEXITY in self.tasks:
            datasets[PERPLEXITY] = ContinuationDataset(haystack, self.tokens, self.seed)
        return datasets


@dataclass(frozen=True)
class GridFiles:
    """The options for the files of a grid."""

    earlier_paths: tuple[Path, ...] = file_option(
        "--from",
        metavar="FILE.json",
        exists=True,
        multiple=True,
        help="Show results that --out wrote instead of measuring; repeatable, results are merged.",
    )
    out: Path | None = file_option(
        metavar="FILE.json", help="Write all results to a file, after each sample."
    )
    resume: bool = option(
        is_flag=True,
        help="Continue the run in --out; options that are not given take its saved values.",
    )
    plot: Path | None = file_option(
        metavar="FILE.png", help="Plot a panel for each task, with a line for each method."
    )
    page: Path | None = file_option(
        "--into",
        metavar="FILE.md",
        exists=True,
        help="Write the tables between this page's markers.",
    )

    def check(self) -> None:
        """Raise InvalidArgument, before hours of work, if results cannot be written."""
        if self.earlier_paths and (self.out or self.resume):
            raise InvalidArgument("--from measures nothing: leave out --out and --resume")
        names = [field.name for record in (GridOptions, ModelOptions) for field in fields(record)]
        settings = [name for name in names if is_in_command_line(name)]
        if self.earlier_paths and settings:
            flag = settings[0].replace("_", "-")
            raise InvalidArgument(f"--from shows all results of its files: leave out --{flag}")
        if self.resume and self.out is None:
            raise InvalidArgument("--resume continues the file of --out: add --out FILE")
        if self.out is not None:
            check_writable(self.out)
            if self.out.is_file() and not self.resume:
                raise InvalidArgument(
                    f"{self.out} already exists: add --resume to continue it, or use another file"
                )
        if self.plot is not None:
            check_plottable(self.plot)
        if self.page is not None:
            check_writable(self.page)
            page_with_grid(self.page, None)


GridOrModelOptions = TypeVar("GridOrModelOptions", GridOptions, ModelOptions)


def options_json(*records: GridOptions | ModelOptions) -> dict[str, Any]:
    """Return the values of all options as JSON values, to be saved with the results."""
    options = {name: value for record in records for name, value in asdict(record).items()}
    return {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in options.items()
    }


def restore_options(options: GridOrModelOptions, saved: Mapping[str, Any]) -> GridOrModelOptions:
    """Return `options`, with those that were not given taken from an earlier run's `saved`."""
    values: dict[str, Any] = {}
    for field in fields(options):
        if field.name in saved and not is_given(field.name):
            value = saved[field.name]
            if field.name == "calibration" and value is not None:
                value = Path(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return replace(options, **values)
