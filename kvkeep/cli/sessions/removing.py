"""`kvkeep sessions rm` and `kvkeep sessions gc`."""

from collections.abc import Sequence

import click

from kvkeep.cli.completion import session_names
from kvkeep.cli.report import counted, megabytes
from kvkeep.cli.store import saved_sessions, store_option, told_store
from kvkeep.models.hub.library import home
from kvkeep.storage.files.atomic import sweep_temporaries
from kvkeep.storage.objects.address import is_url, open_object_store


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=session_names)
@store_option
def rm(names: tuple[str, ...]) -> None:
    """Remove sessions."""
    folder = saved_sessions()
    for name in names:
        folder.existing(name)  # all, or none
    for name in names:
        click.echo(f"removed {name}, {megabytes(folder.remove(name))}")


@click.command()
@store_option
def gc() -> None:
    """Remove what processes that were killed left behind; no session goes.

    These are half-written files of sessions and of the prefix cache, and locks of sessions that
    are gone. In a --store that is a URL, snapshots that nobody goes on from, of all owners.
    """
    prefixes = home() / "prefixes"
    removed: list[object] = [*_swept()]
    removed += sweep_temporaries(prefixes) if prefixes.is_dir() else []
    for file in removed:
        click.echo(f"removed {file}")
    click.echo(f"{counted(len(removed), 'file')} removed")


def _swept() -> Sequence[object]:
    store = told_store()
    if store is None or not is_url(store):
        return saved_sessions().sweep()
    from kvkeep.storage.sessions.shared import sweep_all

    return sweep_all(open_object_store(store))
