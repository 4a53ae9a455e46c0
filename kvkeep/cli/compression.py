"""How memory is compressed, as options say it, and what they stand for."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.options import Decorator
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Calibration, Model, Snapshot

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
    "kvzap",
)
BEST = METHOD_NAMES[0]
UNCALIBRATED = tuple(name for name in METHOD_NAMES if name != "kvzap")  # need no calibration
BUDGET_NAMES = ("heads", "uniform")


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


def calibration_option(meaning: str) -> Decorator:
    return click.option(
        "--calibration",
        metavar="FILE",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help=meaning,
    )


def calibrated(file: Path | None, model: "Model") -> "Calibration | None":
    """What a file says that compression goes by, if one was given."""
    if file is None:
        return None
    from kvkeep.session.calibration import load_calibration

    return load_calibration(file, model)


def require_calibration(saved: object, snapshot: "Snapshot", calibration: Path | None) -> None:
    """Refuses to go on without the calibration that a session was begun with, or with one more.

    saved: what the snapshot is of. Whether it is the same one shows once the model is there.
    """
    needed = bool(snapshot.policy.get("calibrated_by"))
    if needed and calibration is None:
        raise InvalidArgument(
            f"{saved} compresses by a calibration: give the file that it was begun with as "
            "--calibration"
        )
    if calibration is not None and not needed:
        raise InvalidArgument(
            f"{saved} was begun without a calibration, and goes on without; leave --calibration "
            "out, or begin anew"
        )
