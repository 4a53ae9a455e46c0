"""`kvkeep sessions rm` and `kvkeep sessions gc`."""

import click

from kvkeep.cli.completion import session_names
from kvkeep.cli.keeper import session_folder
from kvkeep.cli.report import counted, megabytes
from kvkeep.files.whole import sweep
from kvkeep.models.library import home


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=session_names)
def rm(names: tuple[str, ...]) -> None:
    """Remove sessions."""
    folder = session_folder()
    for name in names:
        folder.existing(name)  # all, or none
    for name in names:
        click.echo(f"removed {name}, {megabytes(folder.remove(name))}")


@click.command()
def gc() -> None:
    """Remove what processes that were killed left behind; no session goes.

    These are half-written files of sessions and of the prefix cache, and locks of sessions that
    are gone.
    """
    prefixes = home() / "prefixes"
    removed = session_folder().sweep() + (sweep(prefixes) if prefixes.is_dir() else [])
    for file in removed:
        click.echo(f"removed {file}")
    click.echo(f"{counted(len(removed), 'file')} removed")
