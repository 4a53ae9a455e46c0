"""Options for compression methods and calibrations, and `kvkeep calibrate`."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.model_options import DEVICE_OPTION, DTYPE_OPTION, MODEL_OPTION, load_by_name
from kvkeep.cli.options import QUIET_OPTION, command, file_option, option, read_nonempty_text
from kvkeep.cli.output import format_mb, progress_bar, say
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import check_writable
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
                f"{name} needs a calibration: add --calibration FILE (`kvkeep calibrate TEXT -o "
                "FILE` makes one for a model)"
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
        "-o",
        metavar="FILE.kvcal",
        show_default="kvkeep's data folder, used by default",
        help="Output file. An existing calibration in it is replaced.",
    ),
    basis_only: bool = option(
        "--basis-only",
        is_flag=True,
        help="Make only the basis of the codecs small and smaller, and no calibration.",
    ),
    model: str = MODEL_OPTION,
    dtype: DtypeName = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    quiet: bool = QUIET_OPTION,
) -> None:
    """Measure a model's attention on the file TEXT ("-": standard input), for compression.

    About ten thousand tokens of typical text are enough. Method kvzap needs a calibration, and
    expected_attention and fitted get better with one. New sessions with policy archive use the
    newest one that is stored with the model; saved sessions use the one that they were created
    with. Pass a file written by --output to other commands as --calibration.

    From 8,960 tokens on it also makes the basis that the codecs small and smaller store cells in.

    Progress is kept in FILE.kvcal.unfinished: the same command resumes an interrupted run.
    """
    content = read_nonempty_text(text)
    if output is not None:
        if basis_only:
            raise click.UsageError("--basis-only makes no calibration: leave --output out")
        check_output_path(output, "calibration")
    loaded_model = load_by_name(model, dtype, device, weights=None, progress=not quiet)
    if basis_only:
        measure_basis(loaded_model, content, quiet)
    else:
        measure_calibration(loaded_model, content, output, quiet)


def measure_calibration(model: "Model", text: str, output: Path | None, quiet: bool) -> None:
    """Calibrate a model on a text, and make a basis. output: None to store it with the model."""
    from kvkeep.compression.calibration import stored
    from kvkeep.evaluate import calibrate as measure

    if output is None:
        unfinished_path = stored.unfinished_calibration_path(model)
        check_writable(unfinished_path)
    else:
        unfinished_path = output.with_name(f"{output.name}.unfinished")
    ids = model.text.encode(text)
    total_tokens = measure.count_calibration_tokens(model, len(ids))
    with progress_bar(total_tokens, not quiet, desc="measuring", unit="tok", leave=False) as bar:

        def report_progress(token_count: int) -> None:
            bar.update(token_count)

        calibration = measure.measure(model, ids, report_progress, unfinished_path)
    if output is None:
        output = stored.add_calibration(calibration)
    else:
        calibration.save(output)
    if not quiet:
        say(
            f"{output}: {format_mb(output.stat().st_size)}, from {len(ids)} tokens; R² of the "
            f"surrogate on held-out text: {calibration.r_squared:.2f}"
        )
    try_measuring_basis(model, text, quiet)
    unfinished_path.unlink(missing_ok=True)  # not before: an interrupted basis is resumed, too


def try_measuring_basis(model: "Model", text: str, quiet: bool) -> None:
    """Make the basis of the codecs small and smaller, or print why a text makes none."""
    try:
        measure_basis(model, text, quiet)
    except InvalidArgument as error:
        if not quiet:
            say(f"no basis for the codecs small and smaller: {error}")


def measure_basis(model: "Model", text: str, quiet: bool) -> None:
    """Make the basis of the codecs small and smaller. Raises InvalidArgument, as the library."""
    from kvkeep.evaluate import basis as measure
    from kvkeep.storage.lossy.basis import add_basis

    ids = model.text.encode(text)
    total_tokens = measure.count_basis_tokens(model, len(ids))
    with progress_bar(total_tokens, not quiet, desc="basis", unit="tok", leave=False) as bar:

        def report_progress(token_count: int) -> None:
            bar.update(token_count)

        path = add_basis(measure.measure_basis(model, ids, report_progress))
    if not quiet:
        say(f"{path}: basis of the codecs small and smaller")
