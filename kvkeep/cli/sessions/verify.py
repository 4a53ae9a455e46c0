"""`kvkeep sessions verify`."""

from pathlib import Path

import click

from kvkeep.cli.completion import session_names
from kvkeep.cli.report import counted, megabytes
from kvkeep.cli.store import saved_sessions, store_option
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.objects.paths import Source

DAMAGED = 2  # exit status


@click.command()
@click.argument("names", metavar="[NAME|FILE]...", nargs=-1, shell_complete=session_names)
@store_option
def verify(names: tuple[str, ...]) -> None:
    """Check every byte of sessions, or of snapshot files; without names, of all sessions.

    Each is said to be OK, or what is wrong with it; status 2 if anything is. Nothing is changed.
    """
    from kvkeep import Snapshot

    every = sorted((path.stem, path) for path in saved_sessions().newest())
    bad = 0
    for name, file in [(name, session_or_file(name)) for name in names] or every:
        try:
            snapshot = Snapshot.load(file)
            size = file.stat().st_size
        except (StoreError, FileNotFoundError) as error:
            if not names and not file.exists():
                continue  # somebody removed it meanwhile
            bad += 1
            click.echo(f"BAD  {name}: {error}")
        else:
            tokens = counted(len(snapshot.tokens), "token")
            click.echo(f"OK   {name}: {tokens}, {megabytes(size)}")
    if bad:
        raise click.exceptions.Exit(DAMAGED)


def session_or_file(name: str) -> Source:
    """The file of a session, or the file of that name. Raises InvalidArgument if neither is."""
    if (path := Path(name)).is_file():
        try:
            return saved_sessions().existing(name)
        except InvalidArgument:
            return path
    if "/" in name:
        raise InvalidArgument(f"there is no file {name}")
    return saved_sessions().existing(name)
