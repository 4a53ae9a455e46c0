"""Shared options and error reporting of the benchmark commands."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe_machine
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.model import DTYPES
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.storage.files.atomic import check_writable, write_json

INTERRUPTED = 128 + 2  # SIGINT, as shells report it

model_option = click.option(
    "--model", "name", default=DEFAULT_MODEL, help="As for `kvkeep generate`."
)
dtype_option = click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
out_option = click.option(
    "--out",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    help="Write the result to this file.",
)


class Measurement(click.Command):
    """A command that reports errors in the input in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvkeepError as error:
            raise click.UsageError(str(error)) from None


class ResultFile:
    """The file of a result, written after each part of a measurement.

    So Ctrl-C or an error loses only the part that was being measured. The machine is that of the
    start. Raises if the file could not be written.
    """

    def __init__(self, path: Path | None, **head: Any) -> None:
        """head: of the content, besides the machine. Raises InvalidArgument for a pipe."""
        check_outputs(path)
        if path is not None and path.exists() and not path.is_file():
            raise InvalidArgument(f"{path} is no regular file: it is replaced after each part")
        self._path, self._head = path, {"machine": asdict(describe_machine()), **head}

    def write(self, **content: Any) -> None:
        """Replace the file, if there is one, by the head and this content."""
        plain = {name: _plain(value) for name, value in content.items()}
        write_json(self._path, self._head | plain)


def _plain(value: Any) -> Any:
    """Return dataclasses, also those in lists and mappings, as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def parse_lengths(text: str) -> tuple[int, ...]:
    """Option type: numbers of tokens, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"expected numbers above 0, separated by commas; found {text!r}")
    return tuple(map(int, parts))


def require_text(name: str, found: int, needed: int) -> None:
    """Raise InvalidArgument if a text has fewer tokens than a passage of it needs."""
    if found < needed:
        raise InvalidArgument(
            f"the text {name!r} has {found:,} tokens, and a passage with what follows it needs "
            f"{needed:,}: lower --tokens"
        )


def write_record(out: Path | None, model: str, **values: Any) -> None:
    """Write a result with the model's name and the machine, if there is a file for it."""
    if out is not None:
        machine = asdict(describe_machine())
        write_json(out, {"model": Path(model).name, **values, "machine": machine})


def check_outputs(*paths: Path | None) -> None:
    """Raise before the measurement if a result could not be written after it."""
    for path in paths:
        if path is not None:
            check_writable(path)
