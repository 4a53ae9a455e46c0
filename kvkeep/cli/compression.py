"""How memory is compressed, as options say it, and what they stand for."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.options import Decorator
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Calibration, Model, Session, Snapshot

# Written out, because the modules that define them import torch, and help must open at once.
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
    "the archive kept what is distinct; calibrated, it keeps what the text can be said from, and "
    "with that far more of its facts: kvkeep pull --calibrate makes that ready, once for a model"
)


def number(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    """A type for options: a number in a range."""

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            raise click.BadParameter(f"expected a number, found {value!r}") from None
        if not minimum <= found <= maximum or math.isinf(found):
            end = "or more" if math.isinf(maximum) else f"to {maximum:g}"
            raise click.BadParameter(f"expected {minimum:g} {end}, found {value}")
        return found

    return read


def ratio(value: str) -> float:
    """A type for options: by how much to compress."""
    found = number(1)(value)
    if found == 1:
        raise click.BadParameter(f"expected more than 1, found {value}")
    return found


def way(value: str) -> str:
    """A type for options: a method, and behind a colon how heads share the cells, if it is said."""
    name, colon, budget = value.partition(":")
    if name not in METHOD_NAMES:
        raise click.BadParameter(f"expected one of {', '.join(METHOD_NAMES)}; found {name!r}")
    if colon and budget not in BUDGET_NAMES:
        raise click.BadParameter(
            f"expected {name}:{f' or {name}:'.join(BUDGET_NAMES)}; found {value!r}"
        )
    return value


def check_calibrated(ways: Iterable[str], calibration: Path | None) -> None:
    """Refuses methods that decide by a calibration where none is given."""
    for name in (each.partition(":")[0] for each in ways):
        if calibration is None and name not in UNCALIBRATED:
            raise click.UsageError(
                f"{name} decides by a calibration: add --calibration FILE (`kvkeep calibrate` "
                "makes one, once for a model)"
            )


def calibration_option(meaning: str, default: str | None = None) -> Decorator:
    """default: what is taken where none is given."""
    return click.option(
        "--calibration",
        metavar="FILE",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        show_default=default or False,
        help=meaning,
    )


def calibrated(file: Path | None, model: "Model") -> "Calibration | None":
    """What a file says that compression goes by, if one was given."""
    if file is None:
        return None
    from kvkeep.compression.calibration.calibration import load_calibration

    return load_calibration(file, model)


def archive_calibration(
    file: Path | None, model: "Model", method: str | None
) -> "Calibration | None":
    """What an archive goes by: a file that was given, or else what is kept of the model.

    method: that was asked for. Only where the calibration would choose it, or it needs one, is the
    kept one used.
    """
    if file is not None or method not in (None, "kvzap"):
        return calibrated(file, model)
    return model.calibration


def original_calibration(
    saved: object, snapshot: "Snapshot", file: Path | None, model: "Model"
) -> "Calibration | None":
    """The calibration that a saved session was begun with: the one that was given, or is kept.

    saved: what the snapshot is of. Raises InvalidArgument where it needs one that is neither.
    """
    needed = snapshot.policy.get("calibrated_by")
    if file is not None or not needed:
        return calibrated(file, model)
    kept = model.calibration
    if kept is None or kept.digest != needed:
        raise _needs_calibration(saved)
    return kept


def check_original_calibration(saved: object, snapshot: "Snapshot", file: Path | None) -> None:
    """Refuses, without the model, a calibration that is one more, and none where one is needed."""
    from kvkeep.compression.calibration.calibration import any_default_calibration

    needed = snapshot.policy.get("calibrated_by")
    if needed and file is None and not any_default_calibration():
        raise _needs_calibration(saved)
    if file is not None and not needed:
        raise InvalidArgument(
            f"{saved} was begun without a calibration, and goes on without; leave --calibration "
            "out, or begin anew"
        )


def _needs_calibration(saved: object) -> InvalidArgument:
    return InvalidArgument(
        f"{saved} compresses by a calibration: give the file that it was begun with as "
        "--calibration"
    )


def gains_from_calibration(session: "Session") -> bool:
    """Whether a calibration would let its archive keep more of what is asked for."""
    settings = session.settings
    return session.policy == "archive" and not (
        settings["calibrated_by"] or settings["method"] != BEST
    )
