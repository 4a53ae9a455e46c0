"""`kvkeep models export`: a converted model as other programs read it."""

from pathlib import Path

import click

from kvkeep.cli.completion import model_names
from kvkeep.cli.which_model import DTYPE


@click.command()
@click.argument("name", shell_complete=model_names)
@click.argument("folder", type=click.Path(path_type=Path))
@DTYPE
@click.option("-q", "--quiet", is_flag=True, help="No progress bars.")
def export(name: str, folder: Path, dtype: str, quiet: bool) -> None:
    """Write model NAME to a new FOLDER in Hugging Face layout, its weights unpacked.

    For transformers and other programs that do not read packed weights. A GGUF file is taken over
    first where that was not done.
    """
    from kvkeep.model import DTYPES
    from kvkeep.models.hub.source import resolve
    from kvkeep.models.weights.export import export as export_model

    export_model(resolve(name, not quiet), folder, DTYPES[dtype], not quiet)
    click.echo(folder)
