"""Options that `passkey`, `needle` and `grid` share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import compression, model_options
from kvkeep.cli.model_options import load_by_name
from kvkeep.cli.options import choice_option, file_option, integer_option, option, option_group
from kvkeep.evaluate.haystack import MANUAL, TEXTS, Haystack
from kvkeep.evaluate.plots import check_plottable
from kvkeep.evaluate.samples import KEY_TYPES, Placement
from kvkeep.evaluate.tasks import SCATTERED_TASKS
from kvkeep.types import DtypeName, WeightFormat
from kvkeep.version import __version__

if TYPE_CHECKING:
    from kvkeep import Calibration, Model


def comma_separated(parse: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """Return an option type: values separated by commas, without duplicates. parse: for each."""
    return lambda text: tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


@dataclass(frozen=True)
class ModelOptions:
    """The options for the model. weights: the format that decode reads; None: as in the file."""

    model: str = model_options.MODEL_OPTION
    dtype: DtypeName = model_options.DTYPE_OPTION
    device: str = model_options.DEVICE_OPTION
    weights: WeightFormat | None = model_options.WEIGHTS_OPTION
    prefill_step: int = model_options.PREFILL_STEP_OPTION
    calibration: Path | None = file_option(exists=True, help="The model's calibration file.")

    def load(self, progress: bool) -> "Model":
        return load_by_name(self.model, self.dtype, self.device, self.weights, progress)

    def record(self, calibration: "Calibration | None") -> dict[str, Any]:
        """Return the settings of a result. calibration: the one in use; it may be a stored one."""
        return {
            "kvkeep": __version__,
            "device": self.device,
            "dtype": self.dtype,
            "weights": self.weights,
            "prefill_step": self.prefill_step,
            "calibration": self.calibration.name if self.calibration else None,
            "calibration_digest": calibration.digest if calibration else None,
        }


@dataclass(frozen=True)
class RecallOptions:
    """The options for hidden facts and for compression of the cache."""

    task: str  # its option is declared by each command
    keys: str | None = choice_option(
        KEY_TYPES,
        'Five digits, or words as in "Chewy-Tiger-Amazon".',
        show_default="number, where the task has a choice",
    )
    depths: tuple[float, ...] | None = option(
        metavar="N,...",
        type=comma_separated(compression.float_in_range(0, 100)),
        show_default="random",
        help="Depths of the fact, in percent of the text; samples cycle through them.",
    )
    samples: int | None = integer_option(
        show_default="1, or one a depth", help="Number of texts, each with other keys."
    )
    seed: int = integer_option(minimum=0, default=0, help="Seed of the keys.")
    method: str | None = option(
        metavar="NAME[:BUDGET]",
        type=compression.parse_method,
        show_default="as Session.compress, or policy archive",
        help=f"How memory is compressed: {', '.join(compression.METHOD_NAMES)}. "
        "BUDGET: heads or uniform.",
    )
    ratio: float | None = option(
        metavar="X", type=compression.parse_ratio, show_default="2", help="Compression ratio."
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
        from kvkeep.compression.calibration.stored import has_any_calibration

        if self.method is not None and not has_any_calibration():
            compression.check_calibrated([self.method], model_options.calibration)
        if self.max_kv_size is not None and not self.streaming:
            raise click.UsageError(
                "--max-kv-size bounds the cache of --streaming only: add --streaming, or leave it "
                "out"
            )
        if self.task in SCATTERED_TASKS and (self.depths is not None or self.plot is not None):
            flag = "--depths" if self.depths is not None else "--plot"
            raise click.UsageError(
                f"task {self.task!r} hides its answer in several sentences, so that it has no "
                f"depth: leave out {flag}"
            )
        if self.plot is not None:
            check_plottable(self.plot)

    @property
    def sample_count(self) -> int:
        """The number of samples, by default one for each depth."""
        return self.samples or len(self.depths or (0,))

    def placement(self, position: int | None = None) -> Placement:
        """Return where to hide facts: at a position of the dataset, or else at the depths."""
        return Placement(position, self.depths or ())


HAYSTACK_OPTION = choice_option(
    tuple(TEXTS),
    "Python's manual, or the docstrings of its library; the two don't overlap.",
    default=MANUAL,
)


def load_haystack(name: str, model: "Model") -> Haystack:
    """Return the text of `--haystack`, in which facts are hidden, split for a model's tokens."""
    return Haystack.from_text(TEXTS[name](), lambda text: len(model.text.encode(text)))


def recall_options(tasks: Iterable[str], help: str) -> Any:
    """Declare the options of a `RecallOptions`. tasks: values of `--task`. help: its help."""
    task = choice_option(tuple(tasks), help, default="single")
    return option_group(RecallOptions, task=task)
