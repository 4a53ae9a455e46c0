"""`kvkeep models`: what is on this machine, and what it takes to run it."""

import click

from kvkeep.cli.models.export import export
from kvkeep.cli.models.listing import list_models
from kvkeep.cli.models.show import show


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List models that are here or have a name, show one, or write one for other programs."""
    if context.invoked_subcommand is None:
        list_models(as_json)


models.add_command(show)
models.add_command(export)
