"""`kvkeep sessions`: what is kept on disk, and what can be done with it."""

import click

from kvkeep.cli.sessions.copying import export, fork, import_
from kvkeep.cli.sessions.listing import list_
from kvkeep.cli.sessions.removing import gc, rm
from kvkeep.cli.sessions.show import show
from kvkeep.cli.sessions.verify import verify


@click.group()
def sessions() -> None:
    """List, look at, check, copy and remove saved sessions."""


for _command in (list_, show, verify, fork, rm, export, import_, gc):
    sessions.add_command(_command)
