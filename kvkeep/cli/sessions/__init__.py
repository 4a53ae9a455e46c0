"""`kvkeep sessions`: list, show, verify, copy and remove saved sessions."""

import click

from kvkeep.cli.lazy import LazyCommand, LazyGroup

_INSPECT, _MANAGE = "kvkeep.cli.sessions.inspect", "kvkeep.cli.sessions.manage"
SESSIONS = {
    "list": LazyCommand(f"{_INSPECT}:list_", "List sessions, the one saved last first."),
    "show": LazyCommand(f"{_INSPECT}:show", "Show what a session holds."),
    "verify": LazyCommand(f"{_INSPECT}:verify", "Check every byte of sessions."),
    "fork": LazyCommand(f"{_MANAGE}:fork", "Copy a session under another name."),
    "rm": LazyCommand(f"{_MANAGE}:rm", "Remove sessions."),
    "export": LazyCommand(f"{_MANAGE}:export", "Copy a session to a file."),
    "import": LazyCommand(f"{_MANAGE}:import_", "Make a session of a file."),
    "gc": LazyCommand(f"{_MANAGE}:gc", "Remove what processes that were killed left behind."),
}


@click.group(cls=LazyGroup, lazy=SESSIONS)
def sessions() -> None:
    """List, look at, check, copy and remove saved sessions."""
