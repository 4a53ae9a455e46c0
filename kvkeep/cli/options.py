"""Options that several commands share, their values, and the reading of prompts."""

import dataclasses
import functools
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from click.core import ParameterSource

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import check_writable
from kvkeep.storage.files.text import decode_text, read_text_file

if TYPE_CHECKING:
    from kvkeep import Sampling

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
STDIN = "-"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def integer_at_least(minimum: int) -> Callable[[str], int]:
    """Return an option type: an integer of at least `minimum`."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise click.BadParameter(f"expected a whole number, found {value!r}") from None
        if number < minimum:
            raise click.BadParameter(f"expected {minimum} or more, found {number}")
        return number

    return parse


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


def integer_option(*names: str, minimum: int = 1, help: str, **settings: Any) -> Decorator:
    return click.option(*names, metavar="N", type=integer_at_least(minimum), help=help, **settings)


def choice_option(name: str, values: Sequence[str], help: str, **settings: Any) -> Decorator:
    return click.option(name, type=click.Choice(values), help=help, **settings)


def file_option(
    *names: str, help: str, metavar: str = "FILE", exists: bool = False, **settings: Any
) -> Decorator:
    """Return an option for the path of a file. exists: whether the file must be there."""
    path = click.Path(exists=exists, dir_okay=not exists, path_type=Path)
    return click.option(*names, metavar=metavar, type=path, help=help, **settings)


def size_option(*names: str, help: str, **settings: Any) -> Decorator:
    return click.option(*names, metavar="SIZE", type=nbytes, help=help, **settings)


JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")
SPECIAL = click.option(
    "--special", is_flag=True, help="Take what reads like a special token, <|im_end|>, for one."
)


def is_given(option: str) -> bool:
    """Whether an option of the running command was given, also by an environment variable."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


def collect_options(record: type[Any], parameter: str, options: Sequence[Any]) -> Decorator:
    """Return a decorator that adds options, and passes their values as one parameter.

    record: a dataclass with a field for each option.
    """
    fields = [field.name for field in dataclasses.fields(record)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            values = {field: arguments.pop(field) for field in fields}
            return command(**arguments, **{parameter: record(**values)})

        decorated: Callable[..., Any] = wrapper
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


@dataclass(frozen=True)
class SamplingChoice:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    seed: int | None
    stop: tuple[str, ...]

    def resolve(self, saved_seed: int | None = None) -> "Sampling":
        """Return the sampling parameters, with a seed unless decoding is greedy.

        saved_seed: the seed of a restored session, used without --seed.
        """
        from kvkeep import Sampling

        sampling = Sampling(**dataclasses.asdict(self))
        if sampling.seed is None and sampling.temperature > 0:
            seed = secrets.randbits(32) if saved_seed is None else saved_seed
            return dataclasses.replace(sampling, seed=seed)
        return sampling


_SAMPLING_OPTIONS = (
    click.option("--temperature", metavar="X", default=0.7, help="0 takes the likeliest token."),
    click.option("--top-k", metavar="N", default=40, help="Only the k likeliest tokens; 0: all."),
    click.option("--top-p", metavar="X", default=0.95, help="Smallest set this probable; 1: off."),
    click.option(
        "--min-p", metavar="X", default=0.05, help="Least share of the likeliest; 0: off."
    ),
    click.option(
        "--repetition-penalty", metavar="X", default=1.1, help="Above 1 repeats less; 1: off."
    ),
    click.option(
        "--repetition-window", metavar="N", default=64, help="Tokens that the penalty sees."
    ),
    click.option(
        "--seed", metavar="N", type=int, show_default="random", help="Same seed, same text."
    ),
    click.option("--stop", metavar="TEXT", multiple=True, help="End before this text. Repeatable."),
)
sampling_options = collect_options(SamplingChoice, "sampling", _SAMPLING_OPTIONS)


@dataclass(frozen=True)
class OutputChoice:
    """The options for the report file, progress bars and the closing line."""

    report: Path | None
    no_progress: bool
    quiet: bool

    @property
    def progress(self) -> bool:
        return not (self.quiet or self.no_progress)

    def check(self) -> None:
        """Raise InvalidArgument if the report file cannot be written."""
        if self.report is not None:
            check_writable(self.report)


_OUTPUT_OPTIONS = (
    file_option("--report", metavar="FILE.json", help="Write the closing numbers there, as JSON."),
    click.option("--no-progress", is_flag=True, help="No progress bars."),
    click.option("-q", "--quiet", is_flag=True, help="No progress bars, no closing line."),
)
output_options = collect_options(OutputChoice, "output", _OUTPUT_OPTIONS)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the text of `--file` followed by `--prompt`, or else standard input."""
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise InvalidArgument("no prompt: give -p TEXT or -f FILE, or pipe text in")
        file = STDIN
    text = (read_text(file) if file is not None else "") + (prompt or "")
    require_utf8(text, "the prompt")
    if not text:
        source = {None: "", STDIN: " (standard input held nothing)"}.get(file, f" ({file})")
        raise InvalidArgument(f"the prompt is empty{source}: expected some text")
    return text


def read_text(file: str) -> str:
    """Read a file, or standard input for "-". Raises InvalidArgument if it is not UTF-8."""
    if file == STDIN:
        return decode_text(sys.stdin.buffer.read(), "standard input")
    return read_text_file(Path(file))


def read_nonempty(file: str) -> str:
    """Read a text by `read_text`. Raises InvalidArgument if it is empty."""
    text = read_text(file)
    if not text:
        raise InvalidArgument(f"{file} is empty: expected some text")
    return text


def require_utf8(text: str, source: str) -> None:
    """Raise InvalidArgument for surrogates, to which Python decodes bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{source} is not UTF-8 text from character {error.start} on; expected text in UTF-8"
        ) from error
