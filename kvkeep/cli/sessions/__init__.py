"""`kvkeep sessions`: list, show, verify, copy and remove saved sessions."""

import click

from kvkeep.cli.lazy import LazyCommand, LazyGroup

SUBCOMMANDS = {
    "list": LazyCommand("sessions.inspect:list_", "List sessions, newest first."),
    "show": LazyCommand(
        "sessions.inspect:show", "Show a session's model, settings, cells and text."
    ),
    "verify": LazyCommand("sessions.inspect:verify", "Check sessions for damage."),
    "fork": LazyCommand("sessions.manage:fork", "Copy a session under another name."),
    "rm": LazyCommand("sessions.manage:rm", "Remove sessions."),
    "export": LazyCommand("sessions.manage:export", "Copy a session to a file."),
    "import": LazyCommand("sessions.manage:import_", "Create a session from a file."),
    "gc": LazyCommand("sessions.manage:gc", "Remove files that killed processes left behind."),
}


@click.group(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def sessions() -> None:
    """List, show, check, copy and remove saved sessions."""
