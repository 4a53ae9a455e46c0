"""`kvkeep models`: what is on this machine, and what it takes to run it."""

import click

from kvkeep.cli.hints import OF_MODELS
from kvkeep.cli.lazy import Lazy, LazyGroup

MODELS = {
    "show": Lazy("kvkeep.cli.models.show:show", "Show what a model is, and what it takes."),
    "export": Lazy("kvkeep.cli.models.export:export", "Write a model for other programs."),
    "rm": Lazy("kvkeep.cli.models.removing:rm", "Remove models, and what was made of them."),
}


@click.group(cls=LazyGroup, lazy=MODELS, elsewhere=OF_MODELS, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List models that are here or have a name; show, export or remove one."""
    if context.invoked_subcommand is None:
        from kvkeep.cli.models.listing import list_models

        list_models(as_json)
