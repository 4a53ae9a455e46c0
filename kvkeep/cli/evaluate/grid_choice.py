"""What the user asks of `kvkeep grid`, and the files that it reads and writes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.cli.evaluate.options import ModelChoice
from kvkeep.cli.options import given
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
PERPLEXITY = "perplexity"  # of the tokens that come next
GRID_TASKS = (*PASSKEYS, *NEEDLES, PERPLEXITY)


@dataclass(frozen=True)
class GridChoice:
    """What is measured."""

    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    tasks: tuple[str, ...]
    samples: int
    junk: int
    tokens: int
    haystack: str
    kv_bits: BitsName | None
    seed: int

    def passkeys(self) -> dict[str, Samples]:
        """The tasks that need no model to draw. Raises InvalidArgument for too little text."""
        return {
            name: Passkey(self.junk, *PASSKEYS[name], seed=self.seed)
            for name in self.tasks
            if name in PASSKEYS
        }

    def of_text(self, haystack: Haystack) -> dict[str, Samples]:
        """The tasks of a real text."""
        found: dict[str, Samples] = {
            name: Needle(haystack, self.tokens, task=NEEDLES[name], seed=self.seed)
            for name in self.tasks
            if name in NEEDLES
        }
        if PERPLEXITY in self.tasks:
            found[PERPLEXITY] = Continuation(haystack, self.tokens, self.seed)
        return found


EitherChoice = TypeVar("EitherChoice", GridChoice, ModelChoice)


def asked_json(*choices: GridChoice | ModelChoice) -> dict[str, Any]:
    """All that was asked for, to be kept beside the readings."""
    found = {name: value for choice in choices for name, value in asdict(choice).items()}
    return {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in found.items()
    }


def as_asked(choice: EitherChoice, earlier: Mapping[str, Any]) -> EitherChoice:
    """A choice of which all that the user does not say now is as it was said earlier."""
    said = {
        each.name: _value(each.name, earlier[each.name])
        for each in fields(choice)
        if each.name in earlier and not given(each.name)
    }
    return replace(choice, **said)


def _value(name: str, found: Any) -> Any:
    if name == "calibration" and found is not None:
        return Path(found)
    return tuple(found) if isinstance(found, list) else found


@dataclass(frozen=True)
class GridFiles:
    """What is read and written."""

    earlier: tuple[Path, ...]
    out: Path | None
    resume: bool
    plot: Path | None
    page: Path | None

    def check(self) -> None:
        """Refuses before hours of work what could not be written after them."""
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
