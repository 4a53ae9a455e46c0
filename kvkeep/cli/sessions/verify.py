"""`kvkeep sessions verify`."""

from pathlib import Path

import click

from kvkeep.cli.keeper import session_folder
from kvkeep.cli.report import counted, megabytes
from kvkeep.errors import InvalidArgument, StoreError

DAMAGED = 2  # exit status


@click.command()
@click.argument("names", metavar="[NAME|FILE]...", nargs=-1)
def verify(names: tuple[str, ...]) -> None:
    """Check every byte of sessions, or of snapshot files; without names, of all sessions.

    Each is said to be OK, or what is wrong with it; status 2 if anything is. Nothing is changed.
    """
    from kvkeep import Snapshot

    bad = 0
    for name in names or session_folder().names():
        file = session_or_file(name)
        try:
            snapshot = Snapshot.load(file)
        except StoreError as error:
            bad += 1
            click.echo(f"BAD  {name}: {error}")
        else:
            tokens = counted(len(snapshot.tokens), "token")
            click.echo(f"OK   {name}: {tokens}, {megabytes(file.stat().st_size)}")
    if bad:
        raise click.exceptions.Exit(DAMAGED)


def session_or_file(name: str) -> Path:
    """The file of a session, or the file of that name. Raises InvalidArgument if neither is."""
    if (path := Path(name)).is_file():
        try:
            return session_folder().existing(name)
        except InvalidArgument:
            return path
    if "/" in name:
        raise InvalidArgument(f"there is no file {name}")
    return session_folder().existing(name)
