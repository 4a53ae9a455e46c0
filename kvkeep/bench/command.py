"""What the measurements have in common as commands: how they fail, and what they write."""

import json
from pathlib import Path
from typing import Any

import click

from kvkeep.cli.output_file import check_writable, write_whole
from kvkeep.errors import KvkeepError

INTERRUPTED = 128 + 2  # SIGINT, as shells report it

out_option = click.option(
    "--out",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    help="Write the result there, as JSON.",
)


class Measurement(click.Command):
    """Says what is wrong with the input in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvkeepError as error:
            raise click.UsageError(str(error)) from None


def check_outputs(*paths: Path | None) -> None:
    """Refuses before minutes of work what could not be written after them."""
    for path in paths:
        if path is not None:
            check_writable(path)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{text}\n".encode())
