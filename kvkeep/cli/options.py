"""Options that several commands share, and what they add up to."""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from kvkeep.cli.output_file import check_writable
from kvkeep.models.source import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvkeep import Model, Sampling, Session

# Written out, because the modules that define them import torch, and help must open at once.
POLICY_NAMES = ("sliding", "full")
DTYPE_NAMES = ("bfloat16", "float32")

SINKS = 4
WHOLE_PROMPT = -1

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def whole_number(least: int) -> Callable[[str], int]:
    """A type for options: a whole number, at least `least`."""

    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise click.BadParameter(f"expected a whole number, found {value!r}") from None
        if number < least:
            raise click.BadParameter(f"expected {least} or more, found {number}")
        return number

    return read


@dataclass(frozen=True)
class Memory:
    """Which model, and what of a text it remembers. keep: None where the command decides."""

    model: str
    dtype: str
    device: str
    max_kv_size: int | None
    keep: int | None
    policy: str
    prefill_step: int

    def check(self) -> None:
        """Refuses what can be refused without the model."""
        if self.max_kv_size is not None and self.keep is not None:
            from kvkeep.policies import make_policy

            make_policy(self.policy, self.max_kv_size, max(self.keep, 0))

    def load(self, progress: bool) -> "Model":
        from kvkeep import load_model

        return load_model(self.model, dtype=self.dtype, device=self.device, progress=progress)

    def session(self, model: "Model", keep: int) -> "Session":
        return model.session(self.max_kv_size, keep, self.policy, self.prefill_step)


@dataclass(frozen=True)
class SamplingChoice:
    """How tokens are chosen, as the user said it."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    seed: int | None
    stop: tuple[str, ...]

    def resolve(self) -> "Sampling":
        """With a seed in any case, so that a report says how to get the same text again."""
        from kvkeep import Sampling

        asked = Sampling(**dataclasses.asdict(self))
        if asked.seed is None and asked.temperature > 0:
            return dataclasses.replace(asked, seed=secrets.randbits(32))
        return asked


@dataclass(frozen=True)
class Output:
    """Where the numbers go, and what is shown beside the result."""

    report: Path | None
    no_progress: bool
    quiet: bool

    @property
    def progress(self) -> bool:
        return not (self.quiet or self.no_progress)

    def check(self) -> None:
        if self.report is not None:
            check_writable(self.report)


def memory_options(keep: Decorator) -> Decorator:
    """keep: the `--keep` option, whose meaning differs between commands."""
    return _collected(
        Memory,
        "memory",
        [
            click.option(
                "-m",
                "--model",
                metavar="NAME",
                default=DEFAULT_MODEL,
                help="Known name, GGUF file, model folder or hub id.",
            ),
            click.option(
                "--max-kv-size",
                metavar="N",
                type=whole_number(1),
                show_default="trained length",
                help="Most tokens held in memory.",
            ),
            keep,
            click.option(
                "--policy",
                type=click.Choice(POLICY_NAMES),
                default=POLICY_NAMES[0],
                help="What to do at --max-kv-size.",
            ),
            click.option(
                "--prefill-step",
                metavar="N",
                type=whole_number(1),
                default=512,
                help="Tokens evaluated at once.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(DTYPE_NAMES),
                default=DTYPE_NAMES[0],
                help="Of weights and memory.",
            ),
            click.option("--device", metavar="NAME", default="cpu", help="Torch device."),
        ],
    )


def sampling_options() -> Decorator:
    return _collected(
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
    return _collected(
        Output,
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


def _collected(into: type[Any], name: str, options: Sequence[Any]) -> Decorator:
    """A decorator that adds options and passes their values on as one object."""
    fields = [field.name for field in dataclasses.fields(into)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def collecting(**given: Any) -> Any:
            values = {field: given.pop(field) for field in fields}
            return command(**given, **{name: into(**values)})

        decorated: Callable[..., Any] = collecting
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate
