"""Options that `passkey`, `needle` and `grid` share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.compression import (
    BEST_METHOD,
    METHOD_NAMES,
    calibration_option,
    check_calibrated,
    float_in_range,
    method_and_budget,
    ratio,
)
from kvkeep.cli.options import Decorator, collect_options, file_option, integer_option
from kvkeep.cli.which_model import DEVICE, DTYPE, MODEL, PREFILL_STEP, WEIGHTS, load_named
from kvkeep.evaluate.haystack import MANUAL, TEXTS, Haystack
from kvkeep.evaluate.plots import check_plottable
from kvkeep.evaluate.samples import KEY_TYPES, Placement
from kvkeep.types import DtypeName, WeightsName

if TYPE_CHECKING:
    from typing import Never

    from tqdm import tqdm

    from kvkeep import Model


def comma_separated(parse: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """Return an option type: values between commas, without duplicates."""
    return lambda text: tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def sample_bar(total: int, progress: bool) -> "tqdm[Never]":
    from tqdm import tqdm

    disable = None if progress else True  # None: show it on terminals only
    return tqdm(total=total, desc="measuring", unit=" samples", leave=False, disable=disable)


@dataclass(frozen=True)
class ModelChoice:
    """The options for the model."""

    model: str
    dtype: DtypeName
    device: str
    weights: WeightsName | None
    prefill_step: int
    calibration: Path | None

    def load(self, progress: bool) -> "Model":
        return load_named(self.model, self.dtype, self.device, self.weights, progress)


@dataclass(frozen=True)
class RecallChoice:
    """The options for hidden facts and compression."""

    task: str
    keys: str | None  # a key type; None for the task's default
    depths: tuple[float, ...] | None  # in percent; None for random ones
    samples: int | None
    seed: int
    method: str
    ratio: float | None
    streaming: bool
    max_kv_size: int | None
    plot: Path | None

    def check(self, choice: ModelChoice) -> None:
        """Check what can be checked without the model. Raises UsageError."""
        check_calibrated([self.method], choice.calibration)
        if self.max_kv_size is not None and not self.streaming:
            raise click.UsageError(
                "--max-kv-size bounds a memory that is compressed while it reads: "
                "add --streaming, or leave it out"
            )
        if self.plot is not None:
            check_plottable(self.plot)

    @property
    def count(self) -> int:
        """The number of samples, by default one for each depth."""
        return self.samples or len(self.depths or (0,))

    def placement(self, position: int | None = None) -> Placement:
        """Return where to hide facts. position: overrides the depths."""
        return Placement(position, self.depths or ())


CALIBRATION = calibration_option("What was learned of this model for compressing.")
model_options = collect_options(
    ModelChoice, "choice", [MODEL, DTYPE, DEVICE, WEIGHTS, PREFILL_STEP, CALIBRATION]
)
HAYSTACK = click.option(
    "--haystack",
    type=click.Choice(tuple(TEXTS)),
    default=MANUAL,
    help="Python's own manual, or its library's docstrings: nothing of one is in the other.",
)


def load_haystack(name: str, model: "Model") -> Haystack:
    return Haystack.from_text(TEXTS[name](), lambda text: len(model.text.encode(text)))


def recall_options(tasks: Iterable[str], help: str) -> Decorator:
    """Return a decorator that passes the options of a `RecallChoice` as `recall`.

    tasks, help: for `--task`.
    """
    fact_options = [
        click.option("--task", type=click.Choice(tuple(tasks)), default="single", help=help),
        click.option(
            "--keys",
            type=click.Choice(KEY_TYPES),
            show_default="number, where the task has a choice",
            help='Five digits, or words as in "Chewy-Tiger-Amazon".',
        ),
        click.option(
            "--depths",
            metavar="N,...",
            type=comma_separated(float_in_range(0, 100)),
            show_default="random",
            help="Where the fact lies, in percent of the text; samples take turns.",
        ),
        integer_option(
            "--samples", minimum=1, show_default="1, or one a depth", help="Texts with other keys."
        ),
        integer_option("--seed", minimum=0, default=0, help="Same seed, same keys."),
    ]
    compression_options = [
        click.option(
            "--method",
            metavar="NAME[:BUDGET]",
            type=method_and_budget,
            default=BEST_METHOD,
            help=f"How memory is compressed: {', '.join(METHOD_NAMES)}. BUDGET: heads or uniform.",
        ),
        click.option(
            "--ratio",
            metavar="X",
            type=ratio,
            show_default="2",
            help="To how many times fewer cells.",
        ),
        click.option(
            "--streaming", is_flag=True, help="Compress while reading, rather than once after it."
        ),
        integer_option(
            "--max-kv-size",
            minimum=1,
            show_default="length / ratio",
            help="Of --streaming: most cells held.",
        ),
    ]
    plot = file_option("--plot", metavar="FILE.png", help="Draw how many are found at each depth.")
    return collect_options(RecallChoice, "recall", [*fact_options, *compression_options, plot])
