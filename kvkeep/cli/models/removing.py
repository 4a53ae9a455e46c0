"""`kvkeep models rm`."""

import click

from kvkeep.cli.completion import model_names
from kvkeep.cli.report import megabytes
from kvkeep.errors import ModelNotFound
from kvkeep.models.hub.library import PulledModel, pulled_models, remove_model


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=model_names)
def rm(names: tuple[str, ...]) -> None:
    """Remove models from this machine, and the other forms of weights that were made of them.

    NAME is as `kvkeep models` lists it, or the folder's. Files that are not kvkeep's stay: the GGUF
    file that a model was converted from, and what the hub's cache holds. Sessions stay, too; they
    go on once their model is here again.
    """
    found = [_named(name) for name in names]  # all, or none
    for model in found:
        click.echo(f"removed {model.name}, {megabytes(remove_model(model, progress=True))}")


def _named(name: str) -> PulledModel:
    here = pulled_models()
    for model in here:
        if name in (model.name, model.folder.name, model.slug):
            return model
    known = ", ".join(model.name for model in here) or "none"
    raise ModelNotFound(f"there is no model {name!r} here; there is: {known}")
