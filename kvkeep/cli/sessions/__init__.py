"""`kvkeep sessions`: list, show, verify, copy and remove saved sessions."""

import click

from kvkeep.cli.lazy import LazyCommand, LazyGroup

SUBCOMMANDS = {
    "list": LazyCommand("sessions.inspect:list_", "List sessions, the one saved last first."),
    "show": LazyCommand("sessions.inspect:show", "Show what a session holds."),
    "verify": LazyCommand("sessions.inspect:verify", "Check every byte of sessions."),
    "fork": LazyCommand("sessions.manage:fork", "Copy a session under another name."),
    "rm": LazyCommand("sessions.manage:rm", "Remove sessions."),
    "export": LazyCommand("sessions.manage:export", "Copy a session to a file."),
    "import": LazyCommand("sessions.manage:import_", "Make a session of a file."),
    "gc": LazyCommand("sessions.manage:gc", "Remove what processes that were killed left behind."),
}


@click.group(cls=LazyGroup, lazy=SUBCOMMANDS)
def sessions() -> None:
    """List, look at, check, copy and remove saved sessions."""
