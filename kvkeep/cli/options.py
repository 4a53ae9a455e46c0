"""Options that several commands share, and the values that they are collected in."""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from click.core import ParameterSource

from kvkeep.storage.files.atomic import check_writable

if TYPE_CHECKING:
    from kvkeep import Sampling

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return an option type: an integer of at least `minimum`."""

    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise click.BadParameter(f"expected a whole number, found {value!r}") from None
        if number < minimum:
            raise click.BadParameter(f"expected {minimum} or more, found {number}")
        return number

    return read


def nbytes(text: str) -> int:
    """Option type: a number of bytes, such as 8GB or 500MB."""
    number = text.strip().upper()
    unit = next((unit for unit in _UNITS if number.endswith(unit)), "")
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise click.BadParameter(f"expected a size such as 8GB or 500MB; found {text!r}")
    return size


def given(option: str) -> bool:
    """Whether an option of the running command was given, rather than left at its default."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


@dataclass(frozen=True)
class SamplingChoice:
    """The sampling options of a command."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    seed: int | None
    stop: tuple[str, ...]

    def resolve(self, saved_seed: int | None = None) -> "Sampling":
        """Return the sampling parameters, with a seed in any case unless decoding is greedy.

        A report can then give the seed that reproduces the text.
        saved_seed: the seed of a restored session, used unless --seed is given.
        """
        from kvkeep import Sampling

        sampling = Sampling(**dataclasses.asdict(self))
        if sampling.seed is None and sampling.temperature > 0:
            seed = secrets.randbits(32) if saved_seed is None else saved_seed
            return dataclasses.replace(sampling, seed=seed)
        return sampling


@dataclass(frozen=True)
class OutputChoice:
    """The options for the report file, progress bars and the closing line."""

    report: Path | None
    no_progress: bool
    quiet: bool

    @property
    def progress(self) -> bool:
        """Whether to show progress bars."""
        return not (self.quiet or self.no_progress)

    def check(self) -> None:
        if self.report is not None:
            check_writable(self.report)


def sampling_options() -> Decorator:
    return collected(
        SamplingChoice,
        "sampling",
        [
            click.option(
                "--temperature", metavar="X", default=0.7, help="0 takes the likeliest token."
            ),
            click.option(
                "--top-k", metavar="N", default=40, help="Only the k likeliest tokens; 0: all."
            ),
            click.option(
                "--top-p", metavar="X", default=0.95, help="Smallest set this probable; 1: off."
            ),
            click.option(
                "--min-p", metavar="X", default=0.05, help="Least share of the likeliest; 0: off."
            ),
            click.option(
                "--repetition-penalty",
                metavar="X",
                default=1.1,
                help="Above 1 repeats less; 1: off.",
            ),
            click.option(
                "--repetition-window", metavar="N", default=64, help="Tokens that the penalty sees."
            ),
            click.option(
                "--seed", metavar="N", type=int, show_default="random", help="Same seed, same text."
            ),
            click.option(
                "--stop", metavar="TEXT", multiple=True, help="End before this text. Repeatable."
            ),
        ],
    )


def output_options() -> Decorator:
    return collected(
        OutputChoice,
        "output",
        [
            click.option(
                "--report",
                metavar="FILE.json",
                type=click.Path(path_type=Path),
                help="Write the closing numbers there, as JSON.",
            ),
            click.option("--no-progress", is_flag=True, help="No progress bars."),
            click.option("-q", "--quiet", is_flag=True, help="No progress bars, no closing line."),
        ],
    )


def collected(into: type[Any], name: str, options: Sequence[Any]) -> Decorator:
    """Return a decorator that adds options and passes their values on as one object.

    into: the dataclass of the values, with a field for each option. name: the parameter of the
    command that receives it.
    """
    fields = [field.name for field in dataclasses.fields(into)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            values = {field: arguments.pop(field) for field in fields}
            return command(**arguments, **{name: into(**values)})

        decorated: Callable[..., Any] = wrapper
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate
