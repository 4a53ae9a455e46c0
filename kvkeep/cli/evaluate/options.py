"""Options that `passkey`, `needle` and `grid` share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.compression import (
    BEST_METHOD,
    METHOD_NAMES,
    check_calibrated,
    float_in_range,
    method_and_budget,
    ratio,
)
from kvkeep.cli.options import choice_option, file_option, integer_option, option, option_group
from kvkeep.cli.which_model import DEVICE, DTYPE, MODEL, PREFILL_STEP, WEIGHT_FORMAT, load_named
from kvkeep.evaluate.haystack import MANUAL, TEXTS, Haystack
from kvkeep.evaluate.plots import check_plottable
from kvkeep.evaluate.samples import KEY_TYPES, Placement
from kvkeep.types import DtypeName, WeightFormat

if TYPE_CHECKING:
    from kvkeep import Model


def comma_separated(parse: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """Return an option type: values between commas, without duplicates."""
    return lambda text: tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


@dataclass(frozen=True)
class ModelOptions:
    """The options for the model. weights: the format that decode reads; None: as in the file."""

    model: str = MODEL
    dtype: DtypeName = DTYPE
    device: str = DEVICE
    weights: WeightFormat | None = WEIGHT_FORMAT
    prefill_step: int = PREFILL_STEP
    calibration: Path | None = file_option(exists=True, help="The model's calibration file.")

    def load(self, progress: bool) -> "Model":
        return load_named(self.model, self.dtype, self.device, self.weights, progress)


@dataclass(frozen=True)
class RecallOptions:
    """The options for hidden facts and compression. Commands declare those for `task`."""

    task: str
    keys: str | None = choice_option(
        KEY_TYPES,
        'Five digits, or words as in "Chewy-Tiger-Amazon".',
        show_default="number, where the task has a choice",
    )
    depths: tuple[float, ...] | None = option(
        metavar="N,...",
        type=comma_separated(float_in_range(0, 100)),
        show_default="random",
        help="Depths of the fact, in percent of the text; samples cycle through them.",
    )
    samples: int | None = integer_option(
        show_default="1, or one a depth", help="Number of texts, each with other keys."
    )
    seed: int = integer_option(minimum=0, default=0, help="Seed of the keys.")
    method: str = option(
        metavar="NAME[:BUDGET]",
        type=method_and_budget,
        default=BEST_METHOD,
        help=f"How memory is compressed: {', '.join(METHOD_NAMES)}. BUDGET: heads or uniform.",
    )
    ratio: float | None = option(
        metavar="X", type=ratio, show_default="2", help="Compression ratio."
    )
    streaming: bool = option(
        is_flag=True, help="Compress during prefill, rather than once after it."
    )
    max_kv_size: int | None = integer_option(
        show_default="length / ratio", help="For --streaming: maximum cells held."
    )
    plot: Path | None = file_option(metavar="FILE.png", help="Plot the share found at each depth.")

    def check(self, model_options: ModelOptions) -> None:
        """Check what can be checked without the model. Raises UsageError."""
        check_calibrated([self.method], model_options.calibration)
        if self.max_kv_size is not None and not self.streaming:
            raise click.UsageError(
                "--max-kv-size bounds the cache of --streaming only: add --streaming, or leave it "
                "out"
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


HAYSTACK = choice_option(
    tuple(TEXTS),
    "Python's manual, or the docstrings of its library; the two don't overlap.",
    default=MANUAL,
)


def load_haystack(name: str, model: "Model") -> Haystack:
    return Haystack.from_text(TEXTS[name](), lambda text: len(model.text.encode(text)))


def recall_options(tasks: Iterable[str], help: str) -> Any:
    """Declare the options of a `RecallOptions`. tasks, help: for `--task`."""
    task = choice_option(tuple(tasks), help, default="single")
    return option_group(RecallOptions, task=task)
