"""Options for compression methods and calibrations, and `kvkeep calibrate`."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.model_options import DEVICE_OPTION, DTYPE_OPTION, MODEL_OPTION, load_by_name
from kvkeep.cli.options import QUIET_OPTION, command, file_option, read_nonempty_text
from kvkeep.cli.output import progress_bar, say
from kvkeep.errors import StoreError
from kvkeep.storage.snapshots.header import check_output_path
from kvkeep.types import DtypeName

if TYPE_CHECKING:
    from kvkeep import Calibration, Model, Session

# Listed here because the modules that define them import torch, which would slow down --help.
METHOD_NAMES = (
    *("fitted", "random", "knorm", "keydiff", "expected_attention", "snapkv", "h2o", "tova"),
    *("average", "sum", "pick_heads", "kvzip", "kvzip-exact", "kvzip+", "kvzap"),
)
BEST_METHOD = METHOD_NAMES[0]
UNCALIBRATED_METHODS = tuple(name for name in METHOD_NAMES if not name.startswith("kvzap"))
BUDGET_NAMES = ("heads", "uniform")  # cells go to the heads that need them; or equally many each
UNCALIBRATED_ARCHIVE_HINT = (
    "the archive was compressed without a calibration; with one, far more facts of the text stay "
    "in it. Make one for this model with: kvkeep pull --calibrate"
)


def float_in_range(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    """Return an option type: a finite number from `minimum` to `maximum`, both included."""

    def parse(value: str) -> float:
        try:
            parsed = float(value)
        except ValueError:
            raise click.BadParameter(f"expected a number, found {value!r}") from None
        if not minimum <= parsed <= maximum or math.isinf(parsed):
            bound = "or more" if math.isinf(maximum) else f"to {maximum:g}"
            raise click.BadParameter(f"expected {minimum:g} {bound}, found {value}")
        return parsed

    return parse


def parse_ratio(value: str) -> float:
    """Option type: a compression ratio, greater than 1."""
    parsed = float_in_range(1)(value)
    if parsed == 1:
        raise click.BadParameter(f"expected a number above 1, found {value}")
    return parsed


def parse_method(value: str) -> str:
    """Option type: a checked METHOD or METHOD:BUDGET, returned unchanged."""
    name, colon, budget = value.partition(":")
    if name not in METHOD_NAMES:
        raise click.BadParameter(f"expected one of {', '.join(METHOD_NAMES)}; found {name!r}")
    if colon and budget not in BUDGET_NAMES:
        choices = f" or {name}:".join(BUDGET_NAMES)
        raise click.BadParameter(f"expected {name}:{choices}; found {value!r}")
    return value


def check_calibrated(methods: Iterable[str], calibration: Path | None) -> None:
    """Raise UsageError if a METHOD[:BUDGET] needs a calibration and no file was given."""
    for name in (method.partition(":")[0] for method in methods):
        if calibration is None and name not in UNCALIBRATED_METHODS:
            raise click.UsageError(
                f"{name} needs a calibration: add --calibration FILE (`kvkeep calibrate` makes one "
                "for a model)"
            )


def load_calibration_file(file: Path | None, model: "Model") -> "Calibration | None":
    """Load the file of `--calibration` for a model. Returns None if there is none."""
    if file is None:
        return None
    from kvkeep.compression.calibration.calibration import load_calibration

    return load_calibration(file, model)


def gains_from_calibration(session: "Session") -> bool:
    """Whether the session is an archive that a calibration would improve."""
    settings = session.settings
    if session.policy != "archive":
        return False
    return settings["method"] == BEST_METHOD and not settings["calibrated_by"]


@command()
@click.argument("text", metavar="TEXT", type=click.Path())
def calibrate(
    text: str,
    output: Path | None = file_option(
        "-o", metavar="FILE.kvcal", show_default="where every command finds it", help="Output file."
    ),
    model: str = MODEL_OPTION,
    dtype: DtypeName = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    quiet: bool = QUIET_OPTION,
) -> None:
    """Measure a model's attention on the file TEXT ("-": standard input), for compression.

    About ten thousand tokens of typical text are enough. Method kvzap needs a calibration, and
    expected_attention and fitted get better with one. Policy archive uses the default calibration
    of a model if there is one; pass a file written by --output to other commands as --calibration.

    From 8,960 tokens on it also makes the basis that the codecs small and smaller store cells in.

    Progress is kept in FILE.kvcal.unfinished: the same command resumes an interrupted run.
    """
    content = read_nonempty_text(text)
    if output is not None:
        check_output_path(output, "calibration")
    loaded_model = load_by_name(model, dtype, device, weights=None, progress=not quiet)
    measure_calibration(loaded_model, content, output, quiet)


def measure_calibration(model: "Model", text: str, output: Path | None, quiet: bool) -> None:
    """Calibrate a model on a text. output: None for the model's default calibration file."""
    from kvkeep.compression.calibration.calibration import calibration_path
    from kvkeep.evaluate import calibrate as measure

    if output is None:
        output = calibration_path(model)
        folder = output.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} cannot be created: {error.strerror or error}") from error
        check_output_path(output, "calibration")
    unfinished_path = unfinished_file(output)
    ids = model.text.encode(text)
    total_tokens = measure.count_calibration_tokens(model, len(ids))
    with progress_bar(total_tokens, not quiet, desc="measuring", unit="tok", leave=False) as bar:

        def report_progress(token_count: int) -> None:
            bar.update(token_count)

        calibration = measure.measure(model, ids, report_progress, unfinished_path)
    size_bytes = calibration.save(output)
    if not quiet:
        say(
            f"{output}: {size_bytes / 1e6:.1f} MB, from {len(ids)} tokens; R² of the surrogate on "
            f"held-out text: {calibration.r_squared:.2f}"
        )
    _measure_basis(model, ids, quiet)
    unfinished_path.unlink(missing_ok=True)  # not before: an interrupted basis is resumed, too


def unfinished_file(output: Path) -> Path:
    """Return the file of partial results beside a calibration's file."""
    return output.with_name(f"{output.name}.unfinished")


def _measure_basis(model: "Model", ids: list[int], quiet: bool) -> None:
    """Make the basis of the codecs small and smaller, if the text is long enough."""
    from kvkeep.evaluate import basis as measure
    from kvkeep.storage.lossy.basis import add_basis

    if len(ids) < (needed := measure.min_basis_tokens()):
        if not quiet:
            say(f"no basis for the codecs small and smaller: that needs {needed:,} tokens")
        return
    total_tokens = measure.count_basis_tokens(model, len(ids))
    with progress_bar(total_tokens, not quiet, desc="basis", unit="tok", leave=False) as bar:

        def report_progress(token_count: int) -> None:
            bar.update(token_count)

        path = add_basis(measure.measure_basis(model, ids, report_progress))
    if not quiet:
        say(f"{path}: basis of the codecs small and smaller")
