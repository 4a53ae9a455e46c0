"""`kvkeep pull`: fetches a model before it is needed."""

import click

from kvkeep.models.source import DEFAULT_MODEL


@click.command()
@click.argument("name", default=DEFAULT_MODEL)
@click.option("-q", "--quiet", is_flag=True, help="No progress bars.")
def pull(name: str, quiet: bool) -> None:
    """Fetch a model now, and say where it is.

    NAME is a known name, a hub id such as owner/name, or a GGUF file to convert. Every command
    that takes --model does the same when it needs a model that is not here yet.
    """
    from kvkeep.models.source import pull as fetch

    folder = fetch(name, progress=not quiet)
    click.echo(f"{name} is in {folder}")
