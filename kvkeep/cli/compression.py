"""Options that select a compression method, and the calibration that each command uses."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.options import Decorator
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Calibration, Model, Session, Snapshot

# Listed here because the modules that define them import torch, which would slow down --help.
METHOD_NAMES = (
    "fitted",
    "random",
    "knorm",
    "keydiff",
    "expected_attention",
    "snapkv",
    "h2o",
    "tova",
    "average",
    "sum",
    "pick_heads",
    "kvzip",
    "kvzip+",
    "kvzap",
)
BEST = METHOD_NAMES[0]
UNCALIBRATED = tuple(name for name in METHOD_NAMES if name != "kvzap")  # need no calibration
BUDGET_NAMES = ("heads", "uniform")
UNCALIBRATED_ARCHIVE = (
    "the archive was compressed without a calibration; with one it keeps far more of the text's "
    "facts: kvkeep pull --calibrate makes one, once for a model"
)


def number(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    """Return an option type: a finite number in a closed range."""

    def read(value: str) -> float:
        try:
            parsed = float(value)
        except ValueError:
            raise click.BadParameter(f"expected a number, found {value!r}") from None
        if not minimum <= parsed <= maximum or math.isinf(parsed):
            end = "or more" if math.isinf(maximum) else f"to {maximum:g}"
            raise click.BadParameter(f"expected {minimum:g} {end}, found {value}")
        return parsed

    return read


def ratio(value: str) -> float:
    """Option type: a compression ratio, greater than 1."""
    parsed = number(1)(value)
    if parsed == 1:
        raise click.BadParameter(f"expected more than 1, found {value}")
    return parsed


def method_and_budget(value: str) -> str:
    """Option type: METHOD or METHOD:BUDGET; the budget says how heads share the cells."""
    name, colon, budget = value.partition(":")
    if name not in METHOD_NAMES:
        raise click.BadParameter(f"expected one of {', '.join(METHOD_NAMES)}; found {name!r}")
    if colon and budget not in BUDGET_NAMES:
        raise click.BadParameter(
            f"expected {name}:{f' or {name}:'.join(BUDGET_NAMES)}; found {value!r}"
        )
    return value


def check_calibrated(methods: Iterable[str], calibration: Path | None) -> None:
    """Raise UsageError if a method needs a calibration and no file was given.

    methods: METHOD or METHOD:BUDGET.
    """
    for name in (method.partition(":")[0] for method in methods):
        if calibration is None and name not in UNCALIBRATED:
            raise click.UsageError(
                f"{name} decides by a calibration: add --calibration FILE (`kvkeep calibrate` "
                "makes one, once for a model)"
            )


def calibration_option(meaning: str, default: str | None = None) -> Decorator:
    """Return the `--calibration` option.

    default: what help shows as the default.
    """
    return click.option(
        "--calibration",
        metavar="FILE",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        show_default=default or False,
        help=meaning,
    )


def calibrated(file: Path | None, model: "Model") -> "Calibration | None":
    """Load the calibration file given on the command line, if any."""
    if file is None:
        return None
    from kvkeep.compression.calibration.calibration import load_calibration

    return load_calibration(file, model)


def archive_calibration(
    file: Path | None, model: "Model", method: str | None
) -> "Calibration | None":
    """Return the calibration for an archive: the given file, or the one stored for the model.

    method: the requested method. The stored calibration is used only if no method was requested
    or if the method needs one.
    """
    if file is not None or method not in (None, "kvzap"):
        return calibrated(file, model)
    return model.calibration


def original_calibration(
    saved: object, snapshot: "Snapshot", file: Path | None, model: "Model"
) -> "Calibration | None":
    """Return the calibration that a saved session was created with.

    It is the given file, or else the one stored for the model.
    saved: the session or file, for messages. Raises InvalidArgument if the session needs a
    calibration and neither of these is the one.
    """
    needed = snapshot.policy.get("calibrated_by")
    if file is not None or not needed:
        return calibrated(file, model)
    stored = model.calibration
    if stored is None or stored.digest != needed:
        raise _needs_calibration(saved)
    return stored


def check_original_calibration(saved: object, snapshot: "Snapshot", file: Path | None) -> None:
    """Check, before the model is loaded, whether a calibration is missing or superfluous.

    Raises InvalidArgument.
    """
    from kvkeep.compression.calibration.calibration import any_default_calibration

    needed = snapshot.policy.get("calibrated_by")
    if needed and file is None and not any_default_calibration():
        raise _needs_calibration(saved)
    if file is not None and not needed:
        raise InvalidArgument(
            f"{saved} was created without a calibration and continues without one; leave "
            "--calibration out, or start a new session"
        )


def _needs_calibration(saved: object) -> InvalidArgument:
    return InvalidArgument(
        f"{saved} compresses by a calibration: give the file that it was created with as "
        "--calibration"
    )


def gains_from_calibration(session: "Session") -> bool:
    """Whether the session is an archive that a calibration would improve."""
    settings = session.settings
    return session.policy == "archive" and not (
        settings["calibrated_by"] or settings["method"] != BEST
    )
