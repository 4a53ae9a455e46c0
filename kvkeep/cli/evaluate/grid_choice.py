"""The options of `kvkeep grid`, and the files that it reads and writes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.cli.evaluate.options import ModelChoice
from kvkeep.cli.options import is_given
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.continuation import Continuation
from kvkeep.evaluate.facts import Samples
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.needle import Needle
from kvkeep.evaluate.passkey import Passkey
from kvkeep.evaluate.tasks import TASKS
from kvkeep.storage.files.atomic import check_writable
from kvkeep.types import BitsName

PASSKEYS = {  # keys, task
    "passkey-number": ("number", "single"),
    "passkey-words": ("words", "single"),
    "several": ("number", "several"),
    "second": ("number", "second"),
}
NEEDLES = {"needle": "single"} | {f"needle-{task}": task for task in TASKS if task != "single"}
PERPLEXITY = "perplexity"  # of the tokens that follow the text
GRID_TASKS = (*PASSKEYS, *NEEDLES, PERPLEXITY)


@dataclass(frozen=True)
class GridChoice:
    """The options of a grid: methods, ratios, tasks and samples."""

    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    tasks: tuple[str, ...]
    samples: int
    junk: int
    tokens: int
    haystack: str
    kv_bits: BitsName | None
    seed: int

    def passkey_tasks(self) -> dict[str, Samples]:
        """Return the tasks whose samples need no tokenizer.

        Raises InvalidArgument for too little text.
        """
        return {
            name: Passkey(self.junk, *PASSKEYS[name], seed=self.seed)
            for name in self.tasks
            if name in PASSKEYS
        }

    def text_tasks(self, haystack: Haystack) -> dict[str, Samples]:
        """Return the tasks over a real text."""
        tasks: dict[str, Samples] = {
            name: Needle(haystack, self.tokens, task=NEEDLES[name], seed=self.seed)
            for name in self.tasks
            if name in NEEDLES
        }
        if PERPLEXITY in self.tasks:
            tasks[PERPLEXITY] = Continuation(haystack, self.tokens, self.seed)
        return tasks


EitherChoice = TypeVar("EitherChoice", GridChoice, ModelChoice)


def choices_json(*choices: GridChoice | ModelChoice) -> dict[str, Any]:
    """Return all choices as JSON values, to be saved beside the readings."""
    values = {name: value for choice in choices for name, value in asdict(choice).items()}
    return {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in values.items()
    }


def with_earlier(choice: EitherChoice, earlier: Mapping[str, Any]) -> EitherChoice:
    """Replace the options that were not given by their values in an earlier run."""
    values = {
        field.name: _value(field.name, earlier[field.name])
        for field in fields(choice)
        if field.name in earlier and not is_given(field.name)
    }
    return replace(choice, **values)


def _value(name: str, saved: Any) -> Any:
    """Convert a JSON value back to the type of its option."""
    if name == "calibration" and saved is not None:
        return Path(saved)
    return tuple(saved) if isinstance(saved, list) else saved


@dataclass(frozen=True)
class GridFiles:
    """The files that are read and written."""

    earlier: tuple[Path, ...]
    out: Path | None
    resume: bool
    plot: Path | None
    page: Path | None

    def check(self) -> None:
        """Check, before hours of work, that the results can be written. Raises InvalidArgument."""
        if self.earlier and (self.out or self.resume):
            raise InvalidArgument("--from measures nothing: leave --out and --resume out")
        if self.resume and self.out is None:
            raise InvalidArgument("--resume goes on with the file of --out: name it")
        if self.out is not None:
            check_writable(self.out)
            if self.out.is_file() and not self.resume:
                raise InvalidArgument(
                    f"{self.out} is there already: add --resume to go on with it, or name another"
                )
        if self.plot is not None:
            from kvkeep.evaluate.plot import check_plottable

            check_plottable(self.plot)
            check_writable(self.plot)
        if self.page is not None:
            from kvkeep.evaluate.grid_table import filled

            check_writable(self.page)
            filled(self.page, None)
