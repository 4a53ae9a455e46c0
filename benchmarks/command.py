"""Shared options and error reporting of the benchmark commands."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe_machine
from kvkeep.errors import KvkeepError
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
