"""Options that several commands share, their values, and the reading of prompts."""

import dataclasses
import functools
import inspect
import math
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from click.core import ParameterSource

from kvkeep.cli.lazy import OWN_OPTIONS, SectionedCommand, SectionedOption
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import check_writable
from kvkeep.storage.files.text import decode_text, read_text_file

if TYPE_CHECKING:
    from kvkeep import Sampling

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
STDIN = "-"
_FILE_PARAMETERS = ("file", "model")  # texts that name a file, or something else
_BYTES_PER_UNIT = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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


def parse_size(text: str) -> int:
    """Option type: a number of bytes, such as 8GB or 500MB."""
    size = parse_size_or_zero(text)
    if not size:
        raise _not_a_size(text)
    return size


def parse_size_or_zero(text: str) -> int:
    """Option type: a number of bytes, such as 500MB, or 0."""
    size_text = text.strip().upper()
    unit = next((unit for unit in _BYTES_PER_UNIT if size_text.endswith(unit)), "")
    try:
        size = int(float(size_text.removesuffix(unit)) * _BYTES_PER_UNIT.get(unit, 1))
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise _not_a_size(text)
    return size


def _not_a_size(text: str) -> click.BadParameter:
    return click.BadParameter(
        f"expected a size such as 8GB or 500MB, in KB, MB, GB, KiB, MiB or GiB; found {text!r}"
    )


class FiniteRange(click.FloatRange):
    """Option type: a finite number in a range. `click.FloatRange` accepts NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def checked_type(parse: Callable[[str], str]) -> Callable[[str], str]:
    """Return an option's type from a function that raises InvalidArgument for a wrong text."""

    def convert(text: str) -> str:
        try:
            return parse(text)
        except InvalidArgument as error:
            raise click.BadParameter(str(error)) from None

    return convert


def option(*flags: str, section: str | None = None, **settings: Any) -> Any:
    """Declare an option, as the default of a command's parameter or of a dataclass field.

    flags: unless there is a long one, the name of the parameter or field is added as one.
    section: its heading in the help; None for that of its group. settings: of `click.option`.
    """

    def declare(name: str, default_section: str = OWN_OPTIONS) -> Decorator:
        has_long_flag = any(flag.startswith("--") for flag in flags)
        long_flag = [] if has_long_flag else [f"--{name.replace('_', '-')}"]
        option_class = partial(SectionedOption, section=section or default_section)
        return click.option(*flags, *long_flag, name, cls=option_class, **settings)  # type: ignore[arg-type]

    return declare


def option_group(options_class: type[Any], *, section: str | None = None, **overrides: Any) -> Any:
    """Declare all options of a dataclass, as the default of a parameter of that class.

    section: their heading in the help; None for that of an outer group. overrides: declarations by
    field, in place of the field's own.
    """
    declarations = _declarations(options_class, **overrides)

    def declare(name: str, default_section: str = OWN_OPTIONS) -> Decorator:
        def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(command)
            def wrapper(**arguments: Any) -> Any:
                values = {field: arguments.pop(field) for field in declarations}
                return command(**arguments, **{name: options_class(**values)})

            return _add_options(wrapper, declarations, section or default_section)

        return decorate

    return declare


def command(
    name: str | None = None, cls: type[click.Command] = SectionedCommand, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator as `click.command`, for a function that declares options as defaults."""
    decorate = click.command(name, cls, **settings)
    return lambda function: decorate(declare_options(function))


def declare_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that a function declares as defaults of its parameters."""
    return _add_options(function, _declarations(function))


def _declarations(target: Callable[..., Any], **overrides: Any) -> dict[str, Any]:
    """Return the options declared as defaults of a function's parameters or dataclass's fields."""
    parameters = inspect.signature(target).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters} | overrides
    empty = inspect.Parameter.empty  # default of arguments, which `click.argument` declares
    return {name: declare for name, declare in defaults.items() if declare is not empty}


def _add_options(
    function: Callable[..., Any], declarations: dict[str, Any], section: str = OWN_OPTIONS
) -> Callable[..., Any]:
    """Decorate a function with options, declared by parameter name."""
    for name, declare in reversed(declarations.items()):
        function = declare(name, section)(function)
    return function


def integer_option(*flags: str, minimum: int = 1, help: str, **settings: Any) -> Any:
    return option(*flags, metavar="N", type=integer_at_least(minimum), help=help, **settings)


def compact_at_option() -> Any:
    """Declare `--compact-at`: the part of the budget beyond which a session is compacted."""
    return option(
        "--compact-at",
        metavar="X",
        type=FiniteRange(0, 1, min_open=True, max_open=True),
        show_default="never",
        help="Compact a session of policy full before a turn that would exceed this part of "
        "--max-kv-size, such as 0.8.",
    )


def choice_option(values: Sequence[str], help: str, **settings: Any) -> Any:
    return option(type=click.Choice(values), help=help, **settings)


def file_option(
    *flags: str, help: str, metavar: str = "FILE", exists: bool = False, **settings: Any
) -> Any:
    """Declare an option for the path of a file. exists: whether the file must be there."""
    path = click.Path(exists=exists, dir_okay=not exists, path_type=Path)
    return option(*flags, metavar=metavar, type=path, help=help, **settings)


def size_option(*flags: str, help: str, **settings: Any) -> Any:
    return option(*flags, metavar="SIZE", help=help, **{"type": parse_size, **settings})


JSON_OPTION = option("--json", is_flag=True, help="As JSON.")
NO_PROGRESS_OPTION = option(is_flag=True, help="No progress bars.")
QUIET_OPTION = option("-q", is_flag=True, help="No progress bars and no statistics.")
SPECULATE_OPTION = option(
    "--speculate/--no-speculate",
    default=True,
    show_default=True,
    help="Speculative decoding by prompt lookup: draft tokens from earlier in the text. The text "
    "is the same to the bit; repetitive text is generated faster.",
)
SPECIAL_OPTION = option(is_flag=True, help="Parse special tokens, such as <|im_end|>, in the text.")


def is_given(parameter: str) -> bool:
    """Whether the user gave an option of the running command, also by environment variable."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not ParameterSource.DEFAULT


def is_in_command_line(parameter: str) -> bool:
    """Whether the user gave an option of the running command as an argument."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is ParameterSource.COMMANDLINE


def _sampling_option(default: float, help: str) -> Any:
    """Declare an option whose default is the model's recommendation, or else `default`."""
    metavar, shown_default = "N" if isinstance(default, int) else "X", f"{default}, or the model's"
    return option(metavar=metavar, type=type(default), show_default=shown_default, help=help)


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters; None for the model's recommendation, or else kvkeep's default."""

    temperature: float | None = _sampling_option(0.7, "0: greedy decoding.")
    top_k: int | None = _sampling_option(40, "Sample among the k most likely tokens; 0: all.")
    top_p: float | None = _sampling_option(
        0.95, "Sample from the smallest set with this probability; 1: all."
    )
    min_p: float | None = _sampling_option(
        0.05, "Least probability, as a fraction of the largest; 0: off."
    )
    repetition_penalty: float | None = _sampling_option(1.1, "Above 1: fewer repetitions; 1: off.")
    repetition_window: int | None = _sampling_option(256, "Recent tokens that the penalty covers.")
    seed: int | None = option(
        metavar="N", type=int, show_default="random", help="The same seed gives the same text."
    )
    stop: tuple[str, ...] = option(
        metavar="TEXT", multiple=True, help="Stop before this text; repeatable."
    )

    def resolve(
        self, defaults: "Sampling | None" = None, saved_seed: int | None = None
    ) -> "Sampling":
        """Return the sampling parameters, with a seed unless decoding is greedy.

        defaults: None for kvkeep's. saved_seed: of a restored session, used without --seed.
        """
        from kvkeep.session.default_sampling import DEFAULT_SAMPLING, with_parameters

        sampling = with_parameters(defaults or DEFAULT_SAMPLING, dataclasses.asdict(self))
        if sampling.seed is None and sampling.temperature > 0:
            seed = secrets.randbits(32) if saved_seed is None else saved_seed
            return dataclasses.replace(sampling, seed=seed)
        return sampling


@dataclass(frozen=True)
class OutputOptions:
    """The options for the report file, progress bars and the closing line."""

    report: Path | None = file_option(
        metavar="FILE.json", help="Write statistics to a file, as JSON."
    )
    no_progress: bool = NO_PROGRESS_OPTION
    quiet: bool = QUIET_OPTION

    @property
    def progress(self) -> bool:
        """Whether to show progress bars."""
        return not (self.quiet or self.no_progress)

    def check(self) -> None:
        """Raise InvalidArgument if the report cannot be written, or would replace another file."""
        if self.report is not None:
            if str(self.report) == STDIN:
                raise InvalidArgument("--report needs a file; - is not one")
            check_writable(self.report)
            _require_own_file("report", self.report)


def _require_own_file(name: str, file: Path) -> None:
    """Raise InvalidArgument if another parameter of the running command names the same file."""
    if file.exists() and not file.is_file():
        return  # a pipe or device, such as /dev/stderr
    context = click.get_current_context()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        is_path = isinstance(value, Path) or parameter.name in _FILE_PARAMETERS
        if not value or not is_path or parameter.name == name:
            continue
        if os.path.realpath(os.path.expanduser(value)) == os.path.realpath(file):
            is_argument = isinstance(parameter, click.Argument)
            other = parameter.human_readable_name if is_argument else parameter.opts[-1]
            raise InvalidArgument(f"--{name} {file} is also {other}: name another file")


OUTPUT_OPTIONS = option_group(OutputOptions, section="Output")


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the text of `--file` followed by `--prompt`, or else standard input."""
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise InvalidArgument("no prompt: use -p TEXT or -f FILE, or pipe text in")
        file = STDIN
    text = (read_text(file) if file is not None else "") + (prompt or "")
    require_utf8(text, "the prompt")
    if not text:
        source_note = {None: "", STDIN: " (standard input was empty)"}.get(file, f" ({file})")
        raise InvalidArgument(f"the prompt is empty{source_note}: expected some text")
    return text


def read_text(file: str) -> str:
    """Read a file, or standard input for "-". Raises InvalidArgument if it is not UTF-8."""
    if file == STDIN:
        return decode_text(sys.stdin.buffer.read(), "standard input")
    return read_text_file(Path(file))


def read_nonempty_text(file: str) -> str:
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
            f"{source} is not UTF-8 text from character {error.start} on; expected UTF-8"
        ) from error
