"""`kvkeep pull`: fetches a model before it is needed."""

import click

from kvkeep.cli.completion import model_names
from kvkeep.cli.stderr import say
from kvkeep.models.hub.source import DEFAULT_MODEL


@click.command()
@click.argument("name", default=DEFAULT_MODEL, shell_complete=model_names)
@click.option(
    "--calibrate",
    "calibrating",
    is_flag=True,
    help="Also measure it on Python's own manual, for compressing its memory: some minutes, once.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress bars.")
def pull(name: str, calibrating: bool, quiet: bool) -> None:
    """Fetch a model now, and say where it is.

    NAME is a known name, a hub id such as owner/name, or a GGUF file to convert. Every command
    that takes --model does the same when it needs a model that is not here yet.
    """
    from kvkeep.models.hub.source import pull as fetch

    folder = fetch(name, progress=not quiet)
    click.echo(f"{name} is in {folder}")
    if calibrating:
        _calibrate(name, quiet)


def _calibrate(name: str, quiet: bool) -> None:
    """Of the dtype that commands use by default."""
    from kvkeep.cli.calibrate import measure
    from kvkeep.cli.which_model import load_named
    from kvkeep.compression.calibration.calibration import calibration_path, default_calibration
    from kvkeep.evaluate.manual import manual_text

    model = load_named(name, "bfloat16", "cpu", weights=None, progress=not quiet)
    if default_calibration(model) is None:
        measure(model, manual_text(), None, quiet)
    elif not quiet:
        say(f"{calibration_path(model)} is its calibration, made before")
