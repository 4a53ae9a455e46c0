"""The options of `kvkeep grid`: what is measured, and the files that are read and written."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvkeep.cli.compression import METHOD_NAMES, UNCALIBRATED, method_and_budget, ratio
from kvkeep.cli.evaluate.options import HAYSTACK, ModelChoice, comma_separated
from kvkeep.cli.memory import BIT_NAMES
from kvkeep.cli.options import collect_options, file_option, integer_option, is_given
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import ContinuationDataset, Dataset, NeedleDataset, PasskeyDataset
from kvkeep.evaluate.grid_table import page_with_grid
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.plots import check_plottable
from kvkeep.evaluate.tasks import TASKS
from kvkeep.storage.files.atomic import check_writable
from kvkeep.types import BitsName

PASSKEYS = {  # key type and task
    "passkey-number": ("number", "single"),
    "passkey-words": ("words", "single"),
    "several": ("number", "several"),
    "second": ("number", "second"),
}
NEEDLES = {"needle": "single"} | {f"needle-{task}": task for task in TASKS if task != "single"}
PERPLEXITY = "perplexity"  # of a continuation
GRID_TASKS = (*PASSKEYS, *NEEDLES, PERPLEXITY)


@dataclass(frozen=True)
class GridChoice:
    """The options for what a grid measures."""

    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    tasks: tuple[str, ...]
    samples: int
    junk: int
    tokens: int
    haystack: str
    kv_bits: BitsName | None
    seed: int

    def passkey_datasets(self) -> dict[str, Dataset]:
        """Return the datasets without a real text, by task. Raises InvalidArgument."""
        return {
            name: PasskeyDataset(self.junk, *PASSKEYS[name], seed=self.seed)
            for name in self.tasks
            if name in PASSKEYS
        }

    def text_datasets(self, haystack: Haystack) -> dict[str, Dataset]:
        """Return the datasets over a real text, by task."""
        datasets: dict[str, Dataset] = {
            name: NeedleDataset(haystack, self.tokens, task=NEEDLES[name], seed=self.seed)
            for name in self.tasks
            if name in NEEDLES
        }
        if PERPLEXITY in self.tasks:
            datasets[PERPLEXITY] = ContinuationDataset(haystack, self.tokens, self.seed)
        return datasets


@dataclass(frozen=True)
class GridFiles:
    """The options for the files of a grid."""

    earlier: tuple[Path, ...]
    out: Path | None
    resume: bool
    plot: Path | None
    page: Path | None

    def check(self) -> None:
        """Raise InvalidArgument, before hours of work, if results cannot be written."""
        if self.earlier and (self.out or self.resume):
            raise InvalidArgument("--from measures nothing: leave --out and --resume out")
        if self.resume and self.out is None:
            raise InvalidArgument("--resume goes on with the file of --out: name it")
        if self.out is not None:
            check_writable(self.out)
            if self.out.is_file() and not self.resume:
                raise InvalidArgument(
                    f"{self.out} is there already: add --resume to go on with it, or name another"
                )
        if self.plot is not None:
            check_plottable(self.plot)
        if self.page is not None:
            check_writable(self.page)
            page_with_grid(self.page, None)


EitherChoice = TypeVar("EitherChoice", GridChoice, ModelChoice)


def options_json(*choices: GridChoice | ModelChoice) -> dict[str, Any]:
    """Return options as JSON values, to be saved with the results."""
    options = {name: value for choice in choices for name, value in asdict(choice).items()}
    return {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in options.items()
    }


def with_saved_options(choice: EitherChoice, saved: Mapping[str, Any]) -> EitherChoice:
    """Take the options that were not given from an earlier run."""
    values: dict[str, Any] = {}
    for field in fields(choice):
        if field.name in saved and not is_given(field.name):
            value = saved[field.name]
            if field.name == "calibration" and value is not None:
                value = Path(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return replace(choice, **values)


def grid_task(name: str) -> str:
    """Option type: a task of the grid."""
    if name not in GRID_TASKS:
        raise click.BadParameter(f"expected names of {', '.join(GRID_TASKS)}; found {name!r}")
    return name


plan_options = collect_options(
    GridChoice,
    "plan",
    [
        click.option(
            "--methods",
            metavar="NAME[:BUDGET],...",
            type=comma_separated(method_and_budget),
            default=",".join(UNCALIBRATED),
            show_default="all that need no calibration",
            help=f"Of {', '.join(METHOD_NAMES)}. BUDGET: heads or uniform.",
        ),
        click.option(
            "--ratios",
            metavar="X,...",
            type=comma_separated(ratio),
            default="2,4,8",
            help="To how many times fewer cells.",
        ),
        click.option(
            "--tasks",
            metavar="NAME,...",
            type=comma_separated(grid_task),
            default=",".join(GRID_TASKS),
            show_default="all",
            help=f"Of {', '.join(GRID_TASKS)}.",
        ),
        integer_option("--samples", minimum=1, default=40, help="Texts of each task."),
        integer_option(
            "--junk", minimum=1, default=250, help="Repetitions of the text that hides pass keys."
        ),
        integer_option("--tokens", minimum=16, default=4000, help="Of a real text, about."),
        HAYSTACK,
        click.option(
            "--kv-bits",
            type=click.Choice(BIT_NAMES),
            show_default="not quantised",
            help="Keep all cells in so many bits, the uncompressed ones, too.",
        ),
        integer_option("--seed", minimum=0, default=0, help="Same seed, same texts."),
    ],
)

file_options = collect_options(
    GridFiles,
    "files",
    [
        file_option(
            *("--from", "earlier"),
            metavar="FILE.json",
            exists=True,
            multiple=True,
            help="Measure nothing: show what --out wrote. Repeatable: all of them together.",
        ),
        file_option(
            "--out", metavar="FILE.json", help="Write every reading there, after each sample."
        ),
        click.option(
            "--resume",
            is_flag=True,
            help="Go on with what is in --out, as it was asked for but for what is said now.",
        ),
        file_option(
            "--plot", metavar="FILE.png", help="Draw a panel for each task, a line for each method."
        ),
        file_option(
            *("--into", "page"),
            metavar="FILE.md",
            exists=True,
            help="Write the tables between this page's markers.",
        ),
    ],
)
