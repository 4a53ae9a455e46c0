"""`kvkeep sessions`: what is kept on disk, and what can be done with it."""

import click

from kvkeep.cli.lazy import Lazy, LazyGroup

_COPYING, _REMOVING = "kvkeep.cli.sessions.copying", "kvkeep.cli.sessions.removing"
SESSIONS = {
    "list": Lazy("kvkeep.cli.sessions.listing:list_", "List sessions, the one saved last first."),
    "show": Lazy("kvkeep.cli.sessions.show:show", "Show what a session holds."),
    "verify": Lazy("kvkeep.cli.sessions.verify:verify", "Check every byte of sessions."),
    "fork": Lazy(f"{_COPYING}:fork", "Copy a session under another name."),
    "rm": Lazy(f"{_REMOVING}:rm", "Remove sessions."),
    "export": Lazy(f"{_COPYING}:export", "Copy a session to a file."),
    "import": Lazy(f"{_COPYING}:import_", "Make a session of a file."),
    "gc": Lazy(f"{_REMOVING}:gc", "Remove what processes that were killed left behind."),
}


@click.group(cls=LazyGroup, lazy=SESSIONS)
def sessions() -> None:
    """List, look at, check, copy and remove saved sessions."""
